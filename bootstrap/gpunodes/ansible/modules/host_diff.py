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
  deferred:
    description: >-
      Roles whose installed software is left as it is, because their changes would restart what runs pods. What is not
      installed yet is pending nevertheless.
    type: list
    elements: str
    default: []
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
notes:
  description: What the user should know about deferred roles.
  returned: always
  type: list
  elements: str
versions:
  description: Versions of the requested packages that are installed.
  returned: always
  type: dict
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.converge import diff

_DEFERRED = (
    "its changes would restart Docker, and stop its pods; `gpunodes runtime upgrade` makes them on a drained node"
)


def installed(wanted: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Whether all packages of a role are installed."""
    return all(package["name"] in versions for package in wanted.get("packages") or ())


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "deferred": {"type": "list", "elements": "str", "default": []},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params["wanted"]
        pending, versions = diff(wanted, module.params["proxy_credentials"])
        deferred = [role for role in pending if role in module.params["deferred"] and installed(wanted[role], versions)]
        return {
            "changed": False,
            "pending": [role for role in pending if role not in deferred],
            "versions": versions,
            "notes": [f"{role}: {_DEFERRED}" for role in deferred],
        }

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
