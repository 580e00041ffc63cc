#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Undo all changes in the ledger of a machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_undo
short_description: Undo everything that gpunodes changed on a machine
version_added: "0.1.0"
description:
  - Purges the packages that M(host) installed and restores the files, kernel settings, services and swap.
  - Packages and files that existed before stay. A machine without a ledger is not changed.
options:
  section:
    description: The section of the ledger to undo; empty for all.
    type: str
    choices: ["", gpu]
    default: ""
attributes:
  check_mode:
    support: full
    description: Reports what would be done, and changes nothing.
  diff_mode:
    support: none
    description: Does not show changes.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Undo everything that gpunodes changed
  host_undo:

- name: Undo only the changes of the GPU driver and its software
  host_undo:
    section: gpu
"""

RETURN = r"""
actions:
  description: The actions taken, or in check mode those that would be taken.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import ledger, undo
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"section": {"type": "str", "choices": ["", *ledger.SECTIONS], "default": ""}},
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        undoer = undo.Undoer(module.check_mode, module.params["section"])
        actions = undoer.run()
        return {"changed": bool(actions), "actions": actions, "diff": undoer.differences}

    carry_out(module, work)


if __name__ == "__main__":
    main()
