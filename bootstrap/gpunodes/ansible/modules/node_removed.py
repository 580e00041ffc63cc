#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Cordon, drain and delete a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_removed
short_description: Remove a node from the cluster
version_added: "0.1.0"
description:
  - Cordons the node, drains it within a time limit and deletes it. Runs on the control-plane machine.
  - Unless O(force) is set, a node that cannot be drained, or that is not ready and has pods, stays cordoned.
options:
  name:
    description: Name of the node.
    type: str
    required: true
  expected:
    description: >-
      Values that the node must still have, as in M(gpunodes.bootstrap.cluster_info): C(uid), C(boot_id), C(machine_id),
      C(product_uuid).
      A node with other values belongs to another machine and is not removed.
    type: dict
    default: {}
  timeout:
    description: Seconds that draining may take.
    type: int
    default: 300
  force:
    description: >-
      Whether to delete the remaining pods regardless of their disruption budgets, also if the node is not ready.
    type: bool
    default: false
  control_plane:
    description: >-
      Whether the node may be that of a control plane. Remove its member of etcd with
      M(gpunodes.bootstrap.etcd_member) before the node is deleted.
    type: bool
    default: false
  keep:
    description: Whether the drained node stays in the cluster.
    type: bool
    default: false
  returns:
    description: >-
      Whether the machine joins again at once. Otherwise the API refuses the node and its requests for certificates from
      then on, until M(gpunodes.bootstrap.join_token) names it.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Lists the pods that leave the node, the node, and that it is refused.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Remove the node from the cluster
  gpunodes.bootstrap.node_removed:
    name: worker-3
    timeout: 120
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
notes:
  description: >-
    Pods that were deleted by force, or in check mode would be, and why the API would let the removed machine in again.
  returned: always
  type: list
  elements: str
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: nodes
      after_header: nodes
      before: {worker-3: present}
      after: {}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import removal
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "expected": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 300},
            "force": {"type": "bool", "default": False},
            "control_plane": {"type": "bool", "default": False},
            "keep": {"type": "bool", "default": False},
            "returns": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters = module.params
        report, notes = removal.remove(
            parameters["name"],
            parameters["timeout"],
            parameters["force"],
            module.check_mode,
            parameters["expected"],
            control_plane=parameters["control_plane"],
            keep=parameters["keep"],
            returns=parameters["returns"],
        )
        return {**report.result(), "notes": notes}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
