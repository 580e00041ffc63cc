#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the cluster of a control-plane machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cluster_info
short_description: Read the cluster
version_added: "0.1.0"
description:
  - Reads version, endpoint, CA hash and nodes with the administrator's kubeconfig on the machine.
  - Never changes anything.
options:
  required:
    description: Whether a missing or unresponsive cluster is an error.
    type: bool
    default: true
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
- name: Read the cluster
  gpunodes.bootstrap.cluster_info:
  register: result
"""

RETURN = r"""
cluster:
  description: The cluster; null if there is none, or if its API does not respond.
  returned: always
  type: dict
  sample: {version: v1.36.3, endpoint: "10.0.0.1:6443", ca_hash: "sha256:...", nodes: []}
unresponsive:
  description: Why the API of a cluster that this machine has does not respond.
  returned: if the cluster is not required and its API does not respond
  type: str
  sample: "the Kubernetes API does not respond: 10.0.0.1:6443: [Errno 111] Connection refused"
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import nodes
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"required": {"type": "bool", "default": True}},
        supports_check_mode=True,
    )
    carry_out(module, lambda: {"changed": False, **nodes.report(module.params["required"])}, changes=False)


if __name__ == "__main__":
    main()
