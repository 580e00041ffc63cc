#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Undo all changes that a machine's ledger lists."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_undo
short_description: Undo everything that gpunodes changed on a machine
version_added: "0.1.0"
description:
  - Purges the packages that M(host) installed and restores the files, kernel settings, services and swap.
  - Keeps everything that existed before. Does nothing on a machine without a ledger.
options:
  part:
    description: Undo only this section of the ledger; empty for all.
    type: str
    choices: ["", gpu]
    default: ""
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: none
    description: Does not show changes.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Undo all changes of gpunodes
  host_undo:

- name: Undo only the changes for GPU software
  host_undo:
    part: gpu
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
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
