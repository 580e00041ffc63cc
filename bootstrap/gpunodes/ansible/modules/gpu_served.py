#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Prove that the cluster serves nodes' GPUs: their kubelets offer them, and a pod gets one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_served
short_description: Prove that the cluster serves the GPUs of nodes
version_added: "0.1.0"
description:
  - Level kubelet is that the node's allocatable C(nvidia.com/gpu) is the number of its GPUs, or that there are more,
    since its device plugin shares them or offers slices of them.
  - Level pod is that a job which asks for one of them runs nvidia-smi there and ends.
  - Runs on the control-plane machine. In check mode nothing is looked at.
options:
  nodes:
    description: The nodes' names with the numbers of their GPUs.
    type: dict
    required: true
  image:
    description: An image in which nvidia-smi can run.
    type: str
    required: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 300
attributes:
  check_mode:
    support: partial
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Prove that pods get the GPUs
  gpu_served:
    nodes: {gpu-1: 8}
    image: nvcr.io/nvidia/k8s-device-plugin:v0.19.0
"""

RETURN = r"""
gpu_nodes:
  description: By node, the levels that were looked at.
  returned: always
  type: dict
  sample: {gpu-1: [{level: kubelet, state: ok, fact: "allocatable nvidia.com/gpu: 8", wanted: "", remedy: ""}]}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import gpu_cluster
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "dict", "required": True},
            "image": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params
        if module.check_mode:
            return {"changed": False, "gpu_nodes": {}}
        nodes = {name: int(gpus) for name, gpus in wanted["nodes"].items()}
        return {"changed": False, "gpu_nodes": gpu_cluster.prove(nodes, wanted["image"], wanted["timeout"])}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
