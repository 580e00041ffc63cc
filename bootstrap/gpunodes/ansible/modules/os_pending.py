#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read which upgrades of the operating system are pending, and whether a reboot is due."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: os_pending
short_description: Read which upgrades of the operating system are pending
version_added: "0.1.0"
description:
  - Reads which packages the package manager would upgrade, which kernels are new, and whether a reboot is due.
  - Never changes anything, except for the lists of packages with C(lists=refreshed).
options:
  lists:
    description: >-
      Which lists of packages are used: those that are C(present), the same C(refreshed), or C(private) ones, which are
      read and deleted again.
    type: str
    choices: [present, private, refreshed]
    default: present
attributes:
  check_mode:
    support: full
    description: It only reads; in check mode the lists are not refreshed.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a machine of the inventory with apt.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Read the pending upgrades
  gpunodes.bootstrap.os_pending:
    lists: private
"""

RETURN = r"""
os_pending:
  description: >-
    Packages with their old version (empty if they are new), their new one, whether it is a security update,
    and whether it only depends on the newest kernel; releases of new kernels; packages that are kept back; those
    that gpunodes holds; and why a reboot is due.
  returned: always
  type: dict
  sample:
    packages: [{name: libssl3, old: 3.0.16-1, new: 3.0.17-1, security: true, kernel_meta: false}]
    kernels: [6.1.0-56-amd64]
    kept_back: []
    held: []
    reboot: []
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.os_upgrade import reboot, upgrade


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lists": {"type": "str", "choices": ["present", "private", "refreshed"], "default": "present"},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        lists = module.params["lists"]
        found = upgrade.look("present" if module.check_mode and lists == "refreshed" else lists)
        return {
            "changed": False,
            "os_pending": {
                "packages": [
                    {
                        "name": each.name,
                        "old": each.old,
                        "new": each.new,
                        "security": each.security,
                        "kernel_meta": each.is_kernel_meta,
                    }
                    for each in (*found.upgrades, *found.new)
                ],
                "kernels": found.kernels(),
                "kept_back": list(found.kept_back),
                "held": list(found.held),
                "reboot": reboot.reasons(),
            },
        }

    carry_out(module, work, changes=module.params["lists"] == "refreshed")


if __name__ == "__main__":
    main()
