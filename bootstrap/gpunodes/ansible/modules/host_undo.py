#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Take back all that the ledger of a machine lists."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_undo
short_description: Bring a machine back to what it was before us
version_added: "0.1.0"
description:
  - Purges the packages that M(host) installed and restores the files, kernel settings, services and swap.
  - What was there before stays. A machine without a ledger is left alone.
options:
  part:
    description: Take back only what belongs to this; empty for all.
    type: str
    choices: ["", gpu]
    default: ""
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Bring the machine back to what it was
  host_undo:

- name: Take only the GPU driver and what belongs to it away
  host_undo:
    part: gpu
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import ledger, undo
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"part": {"type": "str", "choices": ["", *ledger.PARTS], "default": ""}},
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        actions = undo.Undoer(module.check_mode, module.params["part"]).run()
        return {"changed": bool(actions), "actions": actions}

    carry_out(module, work)


if __name__ == "__main__":
    main()
