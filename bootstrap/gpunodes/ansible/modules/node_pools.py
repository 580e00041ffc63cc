#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Set the labels and taints that gpunodes manages on nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_pools
short_description: Set the labels and taints that gpunodes manages on nodes
version_added: "0.1.0"
description:
  - Sets labels and taints of nodes, and removes those that it set earlier and that are no longer requested.
  - An annotation of the node lists the managed labels and taints. Others are never touched.
  - Runs on the control-plane machine. Waits until a node that has just joined is registered.
options:
  nodes:
    description: C(labels) (a mapping) and C(taints) (key, value, effect) by node.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows each node's labels, taints and annotation before and after.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Set labels and taints of nodes
  gpunodes.bootstrap.node_pools:
    nodes:
      gpu-1:
        labels: {gpunodes.dev/pool: a100}
        taints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]
"""

RETURN = r"""
nodes:
  description: The nodes that changed, or in check mode would change.
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
    - before_header: Node gpu-1
      after_header: Node gpu-1
      before: {labels: {}}
      after: {labels: {gpunodes.dev/pool: a100}}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import pools
from ..module_utils.entry import carry_out
from ..module_utils.report import Difference


def main() -> None:
    module = AnsibleModule(argument_spec={"nodes": {"type": "dict", "required": True}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        changed: list[str] = []
        differences: list[Difference] = []
        for name, wanted in module.params["nodes"].items():
            labels = {key: str(value) for key, value in wanted["labels"].items()}
            names, found = pools.apply(name, labels, wanted["taints"], module.check_mode)
            changed += names
            differences += found
        return {"changed": bool(changed), "nodes": changed, "diff": differences}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
