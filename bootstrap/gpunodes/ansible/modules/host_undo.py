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
  - Purges the packages that M(gpunodes.bootstrap.host) installed and restores the files, kernel settings, services and
    swap.
  - Packages and files that existed before stay. A machine without a ledger is not changed.
  - Packages that other packages need by now stay, too, with their services, users and folders.
options:
  section:
    description: The section of the ledger to undo; empty for all.
    type: str
    choices: ["", gpu, nfs_client, nfs_server]
    default: ""
attributes:
  check_mode:
    support: full
    description: Reports what it would undo, and changes nothing.
  diff_mode:
    support: partial
    description: Shows files, packages, folders, mounts, users, the kernel's modules and settings, swap and services.
    details: Firewall rules and the mounts that a stopped container runtime leaves are not listed.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Undo everything that gpunodes changed
  gpunodes.bootstrap.host_undo:

- name: Undo only the changes of the GPU driver and its software
  gpunodes.bootstrap.host_undo:
    section: gpu
"""

RETURN = r"""
actions:
  description: The actions taken, or in check mode those that would be taken.
  returned: always
  type: list
  elements: str
notes:
  description: Which packages stay because packages that gpunodes did not install need them, and which ones those are.
  returned: always
  type: list
  elements: str
  sample: ["dkms stays: zfs-dkms, which gpunodes did not install, needs it"]
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: packages
      after_header: packages
      before: {containerd: "1.7.24~ds1-6"}
      after: {}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpu_mig, ledger, undo
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"section": {"type": "str", "choices": ["", *ledger.SECTIONS], "default": ""}},
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        undoer = undo.Undoer(module.check_mode, module.params["section"])
        undoer.check_unmounted()
        # While the driver is there: the mode of a GPU outlives it.
        with_gpus = module.params["section"] in {"", "gpu"}
        sliced = gpu_mig.remove(module.check_mode, leaves=True) if with_gpus else gpu_mig.Outcome()
        actions = [*sliced.actions, *undoer.run()]
        differences = [*sliced.differences, *undoer.differences]
        return {"changed": bool(actions), "actions": actions, "notes": undoer.notes, "diff": differences}

    carry_out(module, work)


if __name__ == "__main__":
    main()
