#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep the labels and taints of nodes that are ours."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_pools
short_description: Keep the labels and taints of nodes that are ours
version_added: "0.1.0"
description:
  - Gives nodes labels and taints, and takes away those that it gave them earlier and that are no longer wanted.
  - Which are ours stands in an annotation of the node; no other is ever touched.
  - Runs on the control-plane machine. A node that is not there is left out.
options:
  nodes:
    description: By node, its C(labels) (a mapping) and C(taints) (key, value, effect).
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: full
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Put nodes into their pools
  node_pools:
    nodes:
      gpu-1:
        labels: {gpunodes.dev/pool: a100}
        taints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]
"""

RETURN = r"""
nodes:
  description: The nodes that changed, or in check mode would.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import pools
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={"nodes": {"type": "dict", "required": True}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        changed: list[str] = []
        diffs: list[dict[str, str]] = []
        for name, wanted in module.params["nodes"].items():
            labels = {key: str(value) for key, value in wanted["labels"].items()}
            names, found = pools.settle(name, labels, wanted["taints"], module.check_mode)
            changed += names
            diffs += found
        return {"changed": bool(changed), "nodes": changed, "diff": diffs}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
