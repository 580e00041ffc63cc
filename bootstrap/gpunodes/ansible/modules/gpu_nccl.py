#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Test NCCL between nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_nccl
short_description: Test NCCL between nodes
version_added: "0.1.0"
description:
  - Runs C(all_reduce_perf) of nccl-tests over all GPUs of the nodes, in one pod a node, and deletes the pods.
  - Too little bandwidth does not fail the task, so that its result can be recorded.
  - Runs on the control-plane machine. Tests nothing in check mode.
options:
  nodes:
    description: Number of GPUs by node name; at least two nodes.
    type: dict
    required: true
  image:
    description: Image with Open MPI, an SSH server and nccl-tests.
    type: str
    required: true
  resources:
    description: Resources that each pod requests besides its GPUs, such as C(rdma/ib).
    type: dict
    default: {}
  bandwidth:
    description: The least bus bandwidth in GB/s; 0 only reports it.
    type: float
    default: 0
  timeout:
    description: Seconds for the whole test, including the pull of the image.
    type: int
    default: 1800
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It tests nothing in check mode, because that needs pods.
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
- name: Test NCCL between two nodes
  gpunodes.bootstrap.gpu_nccl:
    nodes: {gpu-1: 8, gpu-2: 8}
    image: registry.example/nccl-tests:2.27
"""

RETURN = r"""
nccl:
  description: The bus bandwidth in GB/s, a summary, what failed as a sentence, and why it was skipped.
  returned: always
  type: dict
  sample: {gbs: 182.4, summary: "NCCL all_reduce between 2 nodes: 182.4 GB/s bus bandwidth", failed: "", skipped: ""}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import nccl_test
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "dict", "required": True},
            "image": {"type": "str", "required": True},
            "resources": {"type": "dict", "default": {}},
            "bandwidth": {"type": "float", "default": 0},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": False, "nccl": {}}
        parameters = module.params
        nodes = {name: int(gpus) for name, gpus in parameters["nodes"].items()}
        resources = {name: str(count) for name, count in parameters["resources"].items()}
        found = nccl_test.measure(nodes, parameters["image"], resources, parameters["bandwidth"], parameters["timeout"])
        return {"changed": False, "nccl": found}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
