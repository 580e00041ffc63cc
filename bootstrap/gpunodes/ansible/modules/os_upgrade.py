#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Upgrade the packages and the kernel of a machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: os_upgrade
short_description: Upgrade the packages and the kernel of a machine
version_added: "0.1.0"
description:
  - Upgrades all packages but those that are held or excluded, and never removes one.
  - A new kernel is installed only if the GPU driver can be built for it. If DKMS does not build it, the kernel is
    removed again, and the packages that brought it are held.
  - Configuration files that were changed on the machine stay as they are, and are named.
options:
  state:
    description:
      - C(prepared) downloads packages only.
      - C(applied) installs them.
      - C(verified) only checks the machine after them.
    type: str
    choices: [prepared, applied, verified]
    required: true
  security:
    description: Whether only security updates are installed.
    type: bool
    default: false
  keep:
    description: Shell patterns of packages that are not upgraded.
    type: list
    elements: str
    default: []
  refused:
    description: Releases of kernels that are not installed, each with the reason.
    type: dict
    default: {}
  driver:
    description: Whether a kernel may boot only if the GPU driver's module exists for it.
    type: bool
    default: false
  rebooted:
    description: Whether the machine was rebooted if that was due; then the newest kernel must run to be C(verified).
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reports what it would do, and does nothing.
  diff_mode:
    support: full
    description: Shows packages with their versions, and held packages.
  platform:
    support: full
    description: Runs on a machine of the inventory with apt.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Install security updates
  gpunodes.bootstrap.os_upgrade:
    state: applied
    security: true
    keep: [kubelet, kubeadm, kubectl]
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["upgrade 12 packages", "install the kernel 6.1.0-56-amd64"]
notes:
  description: What the user should know about the result.
  returned: always
  type: list
  elements: str
reboot:
  description: Why a reboot is due; empty if it is not.
  returned: always
  type: list
  elements: str
diff:
  description: Packages with their versions, and held packages, before and after.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.os_upgrade import reboot, upgrade


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["prepared", "applied", "verified"], "required": True},
            "security": {"type": "bool", "default": False},
            "keep": {"type": "list", "elements": "str", "default": []},
            "refused": {"type": "dict", "default": {}},
            "driver": {"type": "bool", "default": False},
            "rebooted": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        request = upgrade.Request(given["security"], given["keep"], given["refused"], given["driver"])
        done, due = upgrade.Outcome(), []
        if given["state"] == "prepared":
            done = upgrade.prepare(request, module.check_mode)
        elif given["state"] == "applied":
            done = upgrade.apply(request, module.check_mode)
            due = reboot.reasons()
        elif not module.check_mode:
            due = upgrade.verify(request, rebooted=given["rebooted"])
            done.notes += [f"a reboot is due: {why}" for why in due]
        return {
            "changed": bool(done.actions),
            "actions": done.actions,
            "diff": done.differences,
            "notes": done.notes,
            "reboot": due,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
