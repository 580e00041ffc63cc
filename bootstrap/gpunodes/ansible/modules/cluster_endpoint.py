#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Move the cluster to another endpoint."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cluster_endpoint
short_description: Move the cluster to another endpoint
version_added: "0.1.0"
description:
  - Changes the endpoint in kubeadm's configuration, in the data for machines that join, and of kube-proxy and the
    network add-on, and replaces their pods on nodes that are ready, some at a time.
  - Each object is compared by itself. A run that was interrupted is continued.
options:
  endpoint:
    description: HOST:PORT at which all machines reach the API.
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
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Move the cluster to another endpoint
  gpunodes.bootstrap.cluster_endpoint:
    endpoint: 10.0.0.10:6443
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: [change kubeadm's configuration in the cluster, restart kube-proxy]
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: ConfigMap cluster-info
      after_header: ConfigMap cluster-info
      before: {server: "https://10.0.0.1:6443"}
      after: {server: "https://10.0.0.10:6443"}
notes:
  description: What still reaches the API at another fixed address.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import endpoint
from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import api_certificate


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        client = api_certificate.own_client()
        report = endpoint.move(client, given["endpoint"], given["timeout"], module.check_mode)
        notes = [f"{each} reaches the API at an earlier address" for each in endpoint.others(client, given["endpoint"])]
        return {**report.result(), "notes": notes}

    carry_out(module, work)


if __name__ == "__main__":
    main()
