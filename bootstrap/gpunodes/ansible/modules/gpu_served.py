#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Verify that the cluster offers nodes' GPUs: their kubelets report them, and a pod gets one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_served
short_description: Verify that the cluster offers the GPUs of nodes to pods
version_added: "0.1.0"
description:
  - Level kubelet checks that the node's allocatable C(nvidia.com/gpu) is at least the number of its GPUs. It is higher
    if the device plugin shares GPUs or offers slices of them.
  - Level pod checks that a job that requests one GPU runs nvidia-smi on the node and completes.
  - Runs on the control-plane machine. Verifies nothing in check mode.
options:
  nodes:
    description: Number of GPUs by node name.
    type: dict
    required: true
  image:
    description: Image in which nvidia-smi can run.
    type: str
    required: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 300
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It verifies nothing in check mode, because that needs pods or an image.
  diff_mode:
    support: none
    description: Deletes everything that it creates.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Verify that pods get the GPUs
  gpunodes.bootstrap.gpu_served:
    nodes: {gpu-1: 8}
    image: nvcr.io/nvidia/k8s-device-plugin:v0.19.0
"""

RETURN = r"""
gpu_nodes:
  description: Results of the checked levels, by node.
  returned: always
  type: dict
  sample: {gpu-1: [{level: kubelet, state: ok, fact: "allocatable nvidia.com/gpu: 8", wanted: "", remedy: ""}]}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpu_cluster
from ..module_utils.entry import carry_out


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
        parameters = module.params
        if module.check_mode:
            return {"changed": False, "gpu_nodes": {}}
        nodes = {name: int(gpus) for name, gpus in parameters["nodes"].items()}
        return {"changed": False, "gpu_nodes": gpu_cluster.verify(nodes, parameters["image"], parameters["timeout"])}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
