#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Restore etcd from a snapshot."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: etcd_restored
short_description: Restore etcd from a snapshot
version_added: "0.1.0"
description:
  - Makes the data of a new single member from a snapshot on this machine, with C(etcdutl) in a static pod of etcd's
    image.
  - Moves the old data aside, starts the control plane that C(etcd_stopped) stopped, and verifies that it works.
  - Continues where an interrupted run has stopped. Does nothing if no restore of this snapshot has begun.
options:
  snapshot:
    description: SHA-256 of the snapshot, in hexadecimal.
    type: str
    required: true
  revision:
    description: The snapshot's revision.
    type: int
    required: true
  timeout:
    description: Seconds that each component may take to start.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Names the snapshot.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Restore etcd
  gpunodes.bootstrap.etcd_restored:
    snapshot: "{{ 'a' * 64 }}"
    revision: 1000
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
    - before_header: etcd
      after_header: etcd
      before: {data: present}
      after: {data: of the snapshot aaaaaaaaaaaaaaaa}
notes:
  description: What a person must know.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import etcd_restore
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "snapshot": {"type": "str", "required": True},
            "revision": {"type": "int", "required": True},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        report, notes = etcd_restore.restore(given["snapshot"], given["revision"], given["timeout"], module.check_mode)
        return {**report.result(), "notes": notes}

    carry_out(module, work)


if __name__ == "__main__":
    main()
