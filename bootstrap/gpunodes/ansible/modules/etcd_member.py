#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Check or remove the etcd member of a control plane."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: etcd_member
short_description: Check or remove the etcd member of a control plane
version_added: "0.1.0"
description:
  - C(present) waits until this machine's etcd is a healthy voting member and its API server is ready. It adds nothing,
    since kubeadm adds members.
  - C(absent) removes the member with O(address), from a control plane that stays. Moves the leadership of etcd first.
    Refuses if fewer of the remaining members would work than etcd needs.
  - C(alone) fails if the cluster of this control plane has members that are not O(leaving), or if that is unknown.
options:
  state:
    description: What to check or to do.
    type: str
    choices: [present, absent, alone]
    default: present
  address:
    description: >-
      IP address in the peer URL of the member. Required except for O(state=alone), and for O(state=absent) with
      O(dead_name).
    type: str
    default: ""
  name:
    description: >-
      For O(state=absent), the name of the machine's node, which its member has; empty without a node. A member of
      another node is never removed.
    type: str
    default: ""
  dead_name:
    description: >-
      For O(state=absent), the name of a machine that is gone; empty for another machine. Its member is also found by
      O(name), or by this name if it has no node, and is not removed while it works.
    type: str
    default: ""
  joining:
    description: >-
      For O(state=absent), whether the machine joins afterwards. Then another control plane that is still joining is
      waited for.
    type: bool
    default: false
  data:
    description: For O(joining), whether the machine has data of etcd.
    type: bool
    default: false
  leaving:
    description: For O(state=alone), names and addresses of the machines that are reset together, with this one.
    type: list
    elements: str
    default: []
  required:
    description: >-
      For O(state=alone), whether others of the inventory stay. Without others, an etcd that does not respond, and
      members that do not work, are no obstacle.
    type: bool
    default: true
  responds:
    description: >-
      For O(state=alone), whether the API of the cluster responds on another control plane. Then one that a restore of
      etcd left stopped is no member.
    type: bool
    default: false
  timeout:
    description: Seconds to wait.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none. C(present) checks nothing.
  diff_mode:
    support: full
    description: Shows the removed member, and that the leadership moves.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Remove the member of a machine that leaves
  gpunodes.bootstrap.etcd_member:
    state: absent
    address: 10.0.0.2
  delegate_to: control-1
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
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
    - before_header: members of etcd
      after_header: members of etcd
      before: {control-2: 10.0.0.2}
      after: {}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import membership
from ..module_utils.entry import carry_out
from ..module_utils.report import Report


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent", "alone"], "default": "present"},
            "address": {"type": "str", "default": ""},
            "name": {"type": "str", "default": ""},
            "dead_name": {"type": "str", "default": ""},
            "joining": {"type": "bool", "default": False},
            "data": {"type": "bool", "default": False},
            "leaving": {"type": "list", "elements": "str", "default": []},
            "required": {"type": "bool", "default": True},
            "responds": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        state, address, name, timeout = (module.params[key] for key in ("state", "address", "name", "timeout"))
        if state == "alone":
            leaving = module.params["leaving"]
            membership.check_alone(leaving, module.params["required"], module.params["responds"])
        elif state == "absent" and module.params["joining"]:
            data = module.params["data"]
            return membership.remove_leftover(address, name, data, timeout, module.check_mode).result()
        elif state == "absent":
            return membership.remove(address, name, module.check_mode, module.params["dead_name"]).result()
        elif not module.check_mode:
            membership.wait_until_member(address, timeout)
        return Report().result()

    # The machine whose member it is may wait for this lock itself.
    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
