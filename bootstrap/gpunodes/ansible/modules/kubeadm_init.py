#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a machine the control plane of a new cluster, unless it is one already."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_init
short_description: Make a machine the control plane of a new cluster
version_added: "0.1.0"
description:
  - Runs C(kubeadm init) with the given documents. Changes nothing if the machine is a complete control plane.
  - If an earlier init by this module did not finish, resets it and starts again.
  - Never touches a cluster that was usable at any time.
options:
  documents:
    description: Documents of kubeadm's configuration file (v1beta4), including an InitConfiguration.
    type: list
    elements: dict
    required: true
  patches:
    description: Patches of the files that kubeadm writes, by name (C(kube-apiserver0+strategic)), as in C(--patches).
    type: dict
    default: {}
  files:
    description: >-
      JSON files that the documents refer to, by path. They are readable by root only and written when the control plane
      is created. C({random key}) is replaced by 32 random bytes in base64, generated on the machine.
    type: dict
    default: {}
  timeout:
    description: Seconds that kubeadm may take, and seconds to wait for a starting control plane.
    type: int
    default: 900
  schedulable:
    description: >-
      Whether ordinary pods may run on the control plane: removes kubeadm's taint from its node. If false, restores the
      taint that this module removed.
    type: bool
    default: false
  labels:
    description: Labels that the control plane's node gets; others stay.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows kubeadm's configuration, without secrets.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Start the control plane
  gpunodes.bootstrap.kubeadm_init:
    documents:
      - apiVersion: kubeadm.k8s.io/v1beta4
        kind: InitConfiguration
      - apiVersion: kubeadm.k8s.io/v1beta4
        kind: ClusterConfiguration
        kubernetesVersion: v1.36.3
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
  sample:
    - before_header: kubeadm
      after_header: kubeadm
      before: {control plane: none}
      after: {control plane: complete}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm.init import Node, init


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "documents": {"type": "list", "elements": "dict", "required": True},
            "patches": {"type": "dict", "default": {}},
            "files": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 900},
            "schedulable": {"type": "bool", "default": False},
            "labels": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters = module.params
        return init(
            parameters["documents"],
            parameters["patches"],
            parameters["files"],
            parameters["timeout"],
            module.check_mode,
            Node(parameters["schedulable"], {key: str(value) for key, value in parameters["labels"].items()}),
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
