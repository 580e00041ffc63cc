#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""See in one look which concerns of a machine are not as wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_diff
short_description: See which concerns of a machine are not as wanted
version_added: "0.1.0"
description:
  - Compares what M(host) is going to be told, concern by concern, with the machine.
  - Never changes anything.
options:
  wanted:
    description: By concern, the parameters of M(host).
    type: dict
    required: true
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
- name: See what is to do
  host_diff:
    wanted:
      node:
        modules: [overlay]
  register: seen
"""

RETURN = r"""
pending:
  description: The concerns that are not as wanted.
  returned: always
  type: list
  elements: str
  sample: [containerd]
versions:
  description: The versions of the wanted packages that are there.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import host
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"wanted": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        pending, versions = host.diff(module.params["wanted"])
        return {"changed": False, "pending": pending, "versions": versions}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
