#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Replace the GPU driver of a machine, or go back to the one that was replaced."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_upgrade
short_description: Replace the GPU driver of a machine, or go back to the old one
version_added: "0.1.0"
description:
  - Downloads the packages of the requested driver and keeps those of the installed one, so that going back needs no
    network; then unloads the driver, installs the other one, and loads it.
  - A driver that processes use is left as it was, and these processes are named.
  - Every stage may be repeated after an interruption.
options:
  wanted:
    description: The desired state of the requested driver, as the module host gets it.
    type: dict
    required: true
  state:
    description:
      - C(prepared) downloads and keeps packages only.
      - C(applied) replaces the driver.
      - C(verified) only checks that the requested driver is installed and loaded.
      - C(undone) goes back to the driver that the requested one replaced.
    type: str
    choices: [prepared, applied, verified, undone]
    required: true
  reboot:
    description: Whether the driver is replaced although processes use it, because the machine will be rebooted.
    type: bool
    default: false
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies in the desired state whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: Reports what it would do, and does nothing.
  diff_mode:
    support: full
    description: Shows the version of the loaded driver, and which drivers are kept.
  platform:
    support: full
    description: Runs on a machine of the inventory with apt.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Download the driver
  gpunodes.bootstrap.gpu_upgrade:
    wanted: "{{ desired_state.gpu.wanted.gpu_driver }}"
    state: prepared
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["replace driver 580.65.06 by 590.44.01"]
version:
  description: The version of the driver.
  returned: always
  type: str
  sample: 590.44.01
reboot:
  description: Why the machine must be rebooted to complete it; empty if no reboot is required.
  returned: always
  type: str
diff:
  description: The loaded driver before and after, and the drivers that are kept.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.driver_upgrade import upgrade
from ..module_utils.entry import carry_out
from ..module_utils.host.spec import spec_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["prepared", "applied", "verified", "undone"], "required": True},
            "reboot": {"type": "bool", "default": False},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        spec = spec_from(module.params["wanted"], module.params["proxy_credentials"])
        state, reboot, check = module.params["state"], module.params["reboot"], module.check_mode
        if state == "prepared":
            done = upgrade.prepare(spec, check)
        elif state == "applied":
            done = upgrade.apply(spec, reboot=reboot, check=check)
        elif state == "undone":
            done = upgrade.undo(spec, reboot=reboot, check=check)
        else:
            done = upgrade.Outcome(version="" if check else upgrade.verify(spec))
        return {
            "changed": bool(done.actions),
            "actions": done.actions,
            "diff": done.differences,
            "version": done.version,
            "reboot": done.reboot,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
