#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep the virtual address of the control planes on one of them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: virtual_address
short_description: Keep the virtual address of the control planes on one of them
version_added: "0.1.0"
description:
  - Brings keepalived into its desired state, as the module C(host) does, and waits until a machine has the address.
  - After a restart it waits until this machine may take the address over again, so that machines can be changed one
    after the other without losing the address.
  - With C(state=absent) it stops the keepalived of gpunodes and removes its configuration. It fails, and leaves that
    running, if the endpoint does not work without it.
options:
  state:
    description: Whether the machine is to have keepalived.
    type: str
    choices: [present, absent]
    default: present
  wanted:
    description: Desired state of keepalived, as for the module C(host); required with C(state=present).
    type: dict
  address:
    description: The virtual address; required with C(state=present).
    type: str
  endpoint:
    description: HOST:PORT of the cluster's endpoint; required with C(state=absent).
    type: str
  settle:
    description: Seconds after a restart until the machine may take the address over again.
    type: int
    default: 0
  here:
    description: Whether this machine must get the address, and not just any control plane.
    type: bool
    default: false
  timeout:
    description: Seconds to wait for the address; 0 for not at all.
    type: int
    default: 0
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: Lists the actions.
  diff_mode:
    support: full
    description: Shows the differences of files, packages and services.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Keep the virtual address on the control planes
  gpunodes.bootstrap.virtual_address:
    wanted: "{{ endpoint_wanted }}"
    address: 10.0.0.10
    timeout: 60
  throttle: 1
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: [install keepalived 1:2.3.3-1, write /etc/keepalived/keepalived.conf]
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: service keepalived
      after_header: service keepalived
      before: {active: false}
      after: {active: true}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import virtual_address
from ..module_utils.entry import carry_out
from ..module_utils.host.spec import spec_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "wanted": {"type": "dict"},
            "address": {"type": "str"},
            "endpoint": {"type": "str"},
            "settle": {"type": "int", "default": 0},
            "here": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 0},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        required_if=[("state", "present", ("wanted", "address")), ("state", "absent", ("endpoint",))],
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        if given["state"] == "absent":
            return virtual_address.give_up(given["endpoint"], module.check_mode).result()
        changes = virtual_address.keep(
            spec_from(given["wanted"], given["proxy_credentials"]),
            given["address"],
            given["settle"],
            given["timeout"],
            here=given["here"],
            check=module.check_mode,
        )
        return {"changed": bool(changes.actions), "actions": changes.actions, "diff": changes.differences}

    carry_out(module, work)


if __name__ == "__main__":
    main()
