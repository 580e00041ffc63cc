#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Compare a machine with its desired state, for all roles at once."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_diff
short_description: Find out which roles have something to do on a machine
version_added: "0.1.0"
description:
  - Compares the machine with the desired state that each role passes to M(gpunodes.bootstrap.host).
  - Never changes anything.
options:
  wanted:
    description: The desired state by role, each like the option O(gpunodes.bootstrap.host#module:wanted).
    type: dict
    required: true
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies in the desired state whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: It only reads.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Compare the machine with its desired state
  gpunodes.bootstrap.host_diff:
    wanted:
      node:
        modules: [overlay]
  register: difference
"""

RETURN = r"""
pending:
  description: Roles with pending changes.
  returned: always
  type: list
  elements: str
  sample: [containerd]
versions:
  description: Versions of the requested packages that are installed.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.converge import diff


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        pending, versions = diff(module.params["wanted"], module.params["proxy_credentials"])
        return {"changed": False, "pending": pending, "versions": versions}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
