#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Create the folders that a storage server shares, or remove those that are empty."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: shared_folders
short_description: Create the folders that a storage server shares
version_added: "0.1.0"
description:
  - Creates each folder that does not exist, with mode 1777 and the owner nobody, and records it in the ledger.
  - Existing folders stay as they are.
  - With V(absent) removes the folders that it created, if they are empty. It never removes a file.
options:
  folders:
    description: The folders, as absolute paths. V(absent) uses those in the ledger.
    type: list
    elements: str
    default: []
  state:
    description: Whether the folders are to exist.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the folders that are created or removed.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Create the folders that are shared
  gpunodes.bootstrap.shared_folders:
    folders: [/srv/training]
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["create /srv/training"]
diff:
  description: The folders before and after, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: folders
      after_header: folders
      before: {}
      after: {/srv/training: present}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import shared_folders
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.params["state"] == "absent":
            return shared_folders.remove(module.check_mode).result()
        return shared_folders.create(module.params["folders"], module.check_mode).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
