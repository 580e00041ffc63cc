#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Wait until nodes are verified as ready, or report why they are not."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_ready
short_description: Verify that nodes are ready
version_added: "0.1.0"
description:
  - Waits until each node is Ready, runs kube-proxy and the network add-on, and a pod on it reaches the API service.
  - Runs on the control-plane machine. An annotation of the node records the boot id for which it was verified.
  - Does not wait in check mode.
options:
  nodes:
    description: Names of the nodes.
    type: list
    elements: str
    required: true
  image:
    description: Image of the pod that verifies a node. It must contain busybox.
    type: str
    required: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 300
  own_network:
    description: >-
      Whether the network add-on is the administrator's: then it and kube-proxy, which it may replace, are not examined
      themselves, and waiting ends early in a cluster that has none yet.
    type: bool
    default: false
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It verifies nothing in check mode, because that needs pods or an image.
  diff_mode:
    support: none
    description: Deletes the pods that it creates; its annotation of the node is no requested change.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Verify that nodes are ready
  gpunodes.bootstrap.node_ready:
    nodes: [worker-1]
    image: registry.k8s.io/e2e-test-images/busybox:1.37.0-1
"""

RETURN = r"""
not_ready:
  description: Reason by node that is not ready; empty if all are ready.
  returned: always
  type: dict
  sample: {worker-1: "pod kube-flannel-ds-x: ImagePullBackOff"}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import readiness
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nodes": {"type": "list", "elements": "str", "required": True},
            "image": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 300},
            "own_network": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters = module.params
        if module.check_mode:
            return {"changed": False, "not_ready": {}}
        reasons = readiness.wait_until_ready(
            parameters["nodes"], parameters["image"], parameters["timeout"], own_network=parameters["own_network"]
        )
        # The pod and the annotation are not changes that the user requested.
        return {"changed": False, "not_ready": {name: reason for name, reason in reasons.items() if reason}}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
