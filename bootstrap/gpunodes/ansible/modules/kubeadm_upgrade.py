#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Upgrade a machine's control plane, or its kubelet's configuration, by kubeadm."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_upgrade
short_description: Upgrade Kubernetes on a machine by kubeadm
version_added: "0.1.0"
description:
  - Runs C(kubeadm upgrade apply) on the first control plane, C(kubeadm upgrade node) on other machines.
  - The machine and its cluster decide whether and what is to do. An interrupted upgrade is continued.
  - The kubeadm that is installed must be that of the version. Packages are not changed.
options:
  version:
    description: The exact version.
    type: str
    required: true
  patches:
    description: Patches of the files that kubeadm writes, by name (C(kube-apiserver0+strategic)), as in C(--patches).
    type: dict
    default: {}
  timeouts:
    description: kubeadm's C(timeouts) (v1beta4).
    type: dict
    default: {}
  timeout:
    description: Seconds that kubeadm may take.
    type: int
    default: 1200
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the versions and kubeadm's configuration.
  platform:
    support: full
    description: Runs on a node.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Upgrade the control plane
  gpunodes.bootstrap.kubeadm_upgrade:
    version: 1.36.3
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm.upgrade import upgrade


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "patches": {"type": "dict", "default": {}},
            "timeouts": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 1200},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        return upgrade(
            given["version"], given["patches"], given["timeouts"], given["timeout"], module.check_mode
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
