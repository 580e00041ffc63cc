#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Verify that a node runs the version to which it was upgraded."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_upgraded
short_description: Verify that a node was upgraded
version_added: "0.1.0"
description:
  - Waits until the node is Ready with the version and a renewed Lease, and its daemons and static pods run.
  - Never changes anything, and does not wait in check mode.
options:
  node:
    description: Name of the node.
    type: str
    required: true
  kubelet:
    description: Exact version of its kubelet. If empty, that is not verified.
    type: str
    default: ""
  components:
    description: Exact version of the static pods of its control plane. If empty, they are not verified.
    type: str
    default: ""
  runtime:
    description: Its container runtime, such as C(containerd://2.1.4). If empty, that is not verified.
    type: str
    default: ""
  daemons:
    description: Whether its static pods and the daemons that the cluster needs must run.
    type: bool
    default: true
  timeout:
    description: Seconds to wait.
    type: int
    default: 600
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: In check mode nothing was upgraded.
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
- name: Verify a worker
  gpunodes.bootstrap.node_upgraded:
    node: worker-1
    kubelet: 1.36.3
"""

RETURN = r"""
version:
  description: The version that was verified.
  returned: always
  type: str
  sample: 1.36.3
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import upgraded
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "kubelet": {"type": "str", "default": ""},
            "components": {"type": "str", "default": ""},
            "runtime": {"type": "str", "default": ""},
            "daemons": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        if module.check_mode:
            return {"changed": False, "version": ""}
        versions = given["kubelet"], given["components"]
        upgraded.wait(given["node"], *versions, given["timeout"], given["runtime"], daemons=given["daemons"])
        return {"changed": False, "version": given["kubelet"] or given["components"] or given["runtime"]}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
