#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Check that a machine has none of these NFS shares mounted."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nfs_unmounted
short_description: Check that a machine has none of these NFS shares mounted
version_added: "0.1.0"
description:
  - Fails if a share, or a folder in it, is mounted on the machine, by the kubelet for a pod or by anybody else.
  - Reads the kernel's list of mounts only, so that it ends although a server hangs.
  - Never changes anything.
options:
  shares:
    description: The shares, as C(SERVER:PATH).
    type: list
    elements: str
    required: true
  timeout:
    description: Seconds to wait for the kubelet, which unmounts the shares of pods that have ended.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    description: It only reads, and does not wait.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Check that no share is mounted
  gpunodes.bootstrap.nfs_unmounted:
    shares: ["nas.example:/export/training"]
"""

RETURN = r"""
changed:
  description: Always false. The task fails if a share is mounted.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import nfs_mounts
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "shares": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        nfs_mounts.check_unmounted(module.params["shares"], 0 if module.check_mode else module.params["timeout"])
        return {"changed": False}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
