#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the members of etcd."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: etcd_members
short_description: Read the members of etcd
version_added: "0.1.0"
description:
  - Reads the members of etcd, which of them respond, and which one leads, with etcdctl in etcd's container.
  - Never changes anything, and never fails because of etcd.
options: {}
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
- name: Read the members of etcd
  gpunodes.bootstrap.etcd_members:
  register: result
"""

RETURN = r"""
etcd:
  description: >-
    The members, each with C(id), C(name), C(learner), C(leader), C(healthy) and C(db_size) in bytes; C(problem) says
    why they are unknown.
  returned: always
  type: dict
  sample: {problem: "", members: [{id: 8e9e05c52164694d, name: control-1, learner: false, leader: true, healthy: true,
           db_size: 20480}]}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import etcd_snapshot
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    carry_out(module, lambda: {"changed": False, "etcd": etcd_snapshot.members()}, changes=False)


if __name__ == "__main__":
    main()
