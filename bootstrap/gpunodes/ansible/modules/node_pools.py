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
  - Runs on the control-plane machine. Skips nodes that do not exist.
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
    description: Shows the changes.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Set labels and taints of nodes
  node_pools:
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
