#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Move a node to another endpoint of its cluster."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_endpoint
short_description: Move a node to another endpoint of its cluster
version_added: "0.1.0"
description:
  - Changes the server in the kubeconfigs of the machine, restarts the kubelet, and waits until its node is Ready and
    has renewed its Lease.
  - Nothing is changed on a machine that does not reach the cluster at the endpoint. A run that was interrupted is
    continued.
options:
  endpoint:
    description: HOST:PORT at which all machines reach the API.
    type: str
    required: true
  node:
    description: The name of the machine's node.
    type: str
    required: true
  timeout:
    description: Seconds to wait for each step.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Lists the actions.
  diff_mode:
    support: full
    description: Shows the differences.
  platform:
    support: full
    description: Runs on a node.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Move a node to another endpoint of its cluster
  gpunodes.bootstrap.node_endpoint:
    endpoint: 10.0.0.10:6443
    node: worker-1
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: [change the server in /etc/kubernetes/kubelet.conf, restart kubelet]
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: /etc/kubernetes/kubelet.conf
      after_header: /etc/kubernetes/kubelet.conf
      before: {server: "https://10.0.0.1:6443"}
      after: {server: "https://10.0.0.10:6443"}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import node_endpoint


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "node": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        return node_endpoint.move(given["endpoint"], given["node"], given["timeout"], module.check_mode).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
