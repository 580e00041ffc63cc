#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a token for joins, or delete those that were made."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: join_token
short_description: Make or delete join tokens
version_added: "0.1.0"
description:
  - C(present) makes a bootstrap token that dies by itself after O(ttl) and waits until joins can use it.
  - C(absent) deletes the tokens that this module made for O(run), and those of interrupted runs.
  - The result holds a secret. Use C(no_log)
options:
  state:
    description: Whether there is to be a token.
    type: str
    choices: [present, absent]
    default: present
  ttl:
    description: Seconds that the token lives.
    type: int
    default: 900
  timeout:
    description: Seconds to wait until joins can use it.
    type: int
    default: 120
  run:
    description: The run that the token is for, by the name that it holds Leases under; empty for none.
    type: str
    default: ""
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
- name: Make a token
  join_token:
    ttl: 900
  register: made
  no_log: true

- name: Delete the token
  join_token:
    state: absent
"""

RETURN = r"""
token:
  description: The token.
  returned: O(state=present), not in check mode
  type: str
deleted:
  description: How many tokens were deleted.
  returned: O(state=absent)
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import cluster
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "ttl": {"type": "int", "default": 900},
            "timeout": {"type": "int", "default": 120},
            "run": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": True, "token": "", "deleted": 0}
        if module.params["state"] == "present":
            made = cluster.make_token(module.params["ttl"], module.params["timeout"], module.params["run"])
            return {"changed": True, "token": made}
        deleted = cluster.delete_tokens(module.params["run"])
        return {"changed": bool(deleted), "deleted": len(deleted)}

    # Joins of several controlling machines may go on at once: a token needs no lock.
    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
