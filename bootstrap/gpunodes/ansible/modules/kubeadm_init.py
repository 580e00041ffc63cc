#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a machine the control plane of a new cluster, or see that it is one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_init
short_description: Make a machine a control plane
version_added: "0.1.0"
description:
  - Runs C(kubeadm init) with the given documents, or changes nothing where a finished control plane stands.
  - An init that this module started and that never finished is reset and started over.
  - A cluster that ever became usable is never touched.
options:
  documents:
    description: The documents of kubeadm's configuration file (v1beta4), an InitConfiguration among them.
    type: list
    elements: dict
    required: true
  patches:
    description: Patches of what kubeadm writes, by name (C(kube-apiserver0+strategic)); see its flag C(--patches).
    type: dict
    default: {}
  files:
    description: >-
      Files that the documents name, JSON by path, for root alone; written when the control plane is made.
      C({random key}) stands for 32 random bytes in base64, made on the machine.
    type: dict
    default: {}
  timeout:
    description: Seconds for kubeadm, and for a control plane that is just starting to answer.
    type: int
    default: 900
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
- name: Start the control plane
  kubeadm_init:
    documents:
      - apiVersion: kubeadm.k8s.io/v1beta4
        kind: InitConfiguration
      - apiVersion: kubeadm.k8s.io/v1beta4
        kind: ClusterConfiguration
        kubernetesVersion: v1.36.3
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import kubeadm
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "documents": {"type": "list", "elements": "dict", "required": True},
            "patches": {"type": "dict", "default": {}},
            "files": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params
        actions = kubeadm.init(
            wanted["documents"], wanted["patches"], wanted["files"], wanted["timeout"], module.check_mode
        )
        return {"changed": bool(actions), "actions": actions}

    carry_out(module, work)


if __name__ == "__main__":
    main()
