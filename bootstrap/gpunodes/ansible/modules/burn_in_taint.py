#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep pods off a node while its GPUs are burnt in."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: burn_in_taint
short_description: Keep pods off a node while its GPUs are burnt in
version_added: "0.1.0"
description:
  - Adds the taint C(gpunodes.dev/burn-in:NoSchedule) to a node on which no pod uses GPUs, or removes it. Others stay.
  - Fails if pods use GPUs of the node, unless they may be evicted; the taint is then as before.
  - Runs on the control-plane machine.
options:
  node:
    description: The node's name.
    type: str
    required: true
  state:
    description: Whether the node has the taint.
    type: str
    choices: [present, absent]
    default: present
  only_tainted:
    description: A node without the taint is left as it is, and no burn-in is due.
    type: bool
    default: false
  drain:
    description: Evict pods that use GPUs, within their disruption budgets.
    type: bool
    default: false
  timeout:
    description: Seconds for the evictions.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows the taint.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Keep pods off the node
  gpunodes.bootstrap.burn_in_taint:
    node: gpu-1
"""

RETURN = r"""
due:
  description: Whether a burn-in is due.
  returned: always
  type: bool
notes:
  description: The pods that were evicted, or in check mode would be.
  returned: always
  type: list
  elements: str
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import burn_in_taint
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "only_tainted": {"type": "bool", "default": False},
            "drain": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters, check = module.params, module.check_mode
        if parameters["state"] == "absent":
            differences = burn_in_taint.release(parameters["node"], check)
            return {"changed": bool(differences), "due": False, "notes": [], "diff": differences}
        due, differences, evicted = burn_in_taint.hold(
            parameters["node"],
            only_tainted=parameters["only_tainted"],
            drain=parameters["drain"],
            limit_s=parameters["timeout"],
            check=check,
        )
        notes = [f"pods {'to evict' if check else 'evicted'}: {', '.join(evicted)}"] if evicted else []
        return {"changed": bool(differences or evicted), "due": due, "notes": notes, "diff": differences}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
