#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Cordon, drain and delete a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_removed
short_description: Take a node out of the cluster
version_added: "0.1.0"
description:
  - Cordons the node, drains it within a limit and deletes it; runs on the control-plane machine.
  - A node that cannot be drained stays, cordoned, unless O(force) is set; so does one that is not ready and has pods.
options:
  name:
    description: The node's name.
    type: str
    required: true
  expected:
    description: >-
      What it must still report, as M(cluster_info) returns it: C(uid), C(boot_id), C(machine_id), C(product_uuid).
      A node that does not is another machine's, and stays.
    type: dict
    default: {}
  timeout:
    description: Seconds for draining.
    type: int
    default: 300
  force:
    description: Delete the pods that do not leave, past their disruption budgets; also where the node is not ready.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Take the node out of the cluster
  node_removed:
    name: worker-3
    timeout: 120
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
notes:
  description: Which pods were deleted by force, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import cluster
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "expected": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 300},
            "force": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params
        actions, notes = cluster.remove(
            wanted["name"], wanted["timeout"], wanted["force"], module.check_mode, wanted["expected"]
        )
        return {"changed": bool(actions), "actions": actions, "notes": notes}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
