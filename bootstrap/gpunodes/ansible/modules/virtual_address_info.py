#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read whether a machine has the virtual address of the control planes."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: virtual_address_info
short_description: Read whether a machine has the virtual address of the control planes
version_added: "0.1.0"
description:
  - Never changes anything.
options:
  address:
    description: The virtual address.
    type: str
    required: true
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
- name: Read whether the machine has the virtual address
  gpunodes.bootstrap.virtual_address_info:
    address: 10.0.0.10
  register: result
"""

RETURN = r"""
has_virtual_address:
  description: Whether the machine has it.
  returned: always
  type: bool
  sample: true
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import virtual_address
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={"address": {"type": "str", "required": True}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        return {"changed": False, "has_virtual_address": virtual_address.is_held(module.params["address"])}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
