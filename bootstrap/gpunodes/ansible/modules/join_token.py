#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Create a token for joins, or delete join tokens."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: join_token
short_description: Create or delete join tokens
version_added: "0.1.0"
description:
  - C(present) creates a bootstrap token that expires after O(ttl), and waits until joins can use it.
  - C(absent) deletes the tokens that this module created for O(run), and those of interrupted runs.
  - The result contains a secret. Use C(no_log).
options:
  state:
    description: Whether to create or delete tokens.
    type: str
    choices: [present, absent]
    default: present
  ttl:
    description: Lifetime of the token in seconds.
    type: int
    default: 900
  timeout:
    description: Seconds to wait until joins can use it.
    type: int
    default: 120
  run:
    description: Holder of the Leases of the run that uses the token; empty for none.
    type: str
    default: ""
  nodes:
    description: >-
      Names of the nodes that join with the token. The API refuses them no longer, if M(gpunodes.bootstrap.node_removed)
      removed them.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the lifetime of a new token, and the Secrets of deleted ones. A token itself is never shown.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Create a token
  gpunodes.bootstrap.join_token:
    ttl: 900
  register: created
  no_log: true

- name: Delete the token
  gpunodes.bootstrap.join_token:
    state: absent
"""

RETURN = r"""
token:
  description: The token; empty in check mode.
  returned: O(state=present)
  type: str
deleted:
  description: Number of deleted tokens, or in check mode of those that it would delete.
  returned: O(state=absent)
  type: int
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: join token
      after_header: join token
      before: ""
      after: {token: "(secret 1)", lifetime: 900 s}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import tokens
from ..module_utils.entry import carry_out
from ..module_utils.masking import Secret
from ..module_utils.report import Difference


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "ttl": {"type": "int", "default": 900},
            "timeout": {"type": "int", "default": 120},
            "run": {"type": "str", "default": ""},
            "nodes": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        ttl_s, run, nodes = module.params["ttl"], module.params["run"], module.params["nodes"]
        if module.params["state"] == "present":
            token = "" if module.check_mode else tokens.create(ttl_s, module.params["timeout"], run, nodes)
            difference = Difference("join token", None, {"token": Secret(token), "lifetime": f"{ttl_s} s"})
            return {"changed": True, "token": token, "diff": [difference]}
        deleted = tokens.delete(run, module.check_mode)
        difference = Difference("join tokens", dict.fromkeys(deleted, "present"), {})
        return {"changed": bool(deleted), "deleted": len(deleted), "diff": [difference]}

    # Several controllers may join machines at the same time: creating a token needs no lock.
    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
