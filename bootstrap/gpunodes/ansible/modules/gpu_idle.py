#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Check that no pod uses GPUs of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_idle
short_description: Check that no pod uses GPUs of a node
version_added: "0.1.0"
description:
  - Fails if a GPU is allocated to a pod, even if the pod does not compute at the moment.
  - Runs on the control-plane machine.
  - Never changes anything.
options:
  node:
    description: The node's name.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: It only reads.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Check that no pod uses the GPUs
  gpunodes.bootstrap.gpu_idle:
    node: gpu-1
"""

RETURN = r"""
changed:
  description: Always false. The task fails if a pod uses a GPU.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpu_cluster
from ..module_utils.entry import carry_out
from ..module_utils.problem import MachineProblem


def main() -> None:
    module = AnsibleModule(argument_spec={"node": {"type": "str", "required": True}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        node = module.params["node"]
        pods = gpu_cluster.pods_with_gpus(node)
        if pods:
            raise MachineProblem(
                f"{', '.join(pods)} use{'s' if len(pods) == 1 else ''} GPUs of {node}",
                "no pod with a GPU while the driver is removed, or another program begins to serve the GPUs",
                f"delete the pods, or `kubectl drain {node} --ignore-daemonsets --delete-emptydir-data`, then again",
            )
        return {"changed": False}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
