#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Wait until nodes are ready in truth, or say why they are not."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_ready
short_description: Prove nodes ready
version_added: "0.1.0"
description:
  - Waits until each node is Ready, kube-proxy and the network run there, and a pod there reaches the API service.
  - Runs on the control-plane machine. The proof is noted at the node with the boot id of its machine.
  - In check mode nothing is waited for.
options:
  nodes:
    description: The nodes' names.
    type: list
    elements: str
    required: true
  image:
    description: The image of the probe pod, with busybox in it.
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
- name: Prove the nodes ready
  node_ready:
    nodes: [worker-1]
    image: registry.k8s.io/e2e-test-images/busybox:1.37.0-1
"""

RETURN = r"""
not_ready:
  description: By node, why it is not ready; empty when all are.
  returned: always
  type: dict
  sample: {worker-1: "pod kube-flannel-ds-x: ImagePullBackOff"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import cluster
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "list", "elements": "str", "required": True},
            "image": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params
        if module.check_mode:
            return {"changed": False, "not_ready": {}}
        reasons = cluster.prove(wanted["nodes"], wanted["image"], wanted["timeout"])
        # Proving changes nothing that anybody asked to change.
        return {"changed": False, "not_ready": {name: why for name, why in reasons.items() if why}}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
