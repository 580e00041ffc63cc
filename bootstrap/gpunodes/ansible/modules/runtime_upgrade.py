#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Replace the container runtime of a machine, or go back to the one that was replaced."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: runtime_upgrade
short_description: Replace the container runtime of a machine, or go back to the old one
version_added: "0.1.0"
description:
  - Downloads the requested packages of the container runtime and the container toolkit, and keeps the installed ones,
    so that going back needs no network; then installs them with the configuration of their version, and restarts the
    services.
  - Every stage may be repeated after an interruption.
options:
  wanted:
    description: >-
      The desired state by role (containerd, docker, cri_dockerd, container_toolkit), each as the module
      M(gpunodes.bootstrap.host) takes it.
    type: dict
    required: true
  runtime:
    description: The runtime of the machine's node.
    type: str
    choices: [containerd, docker]
    default: containerd
  state:
    description:
      - C(prepared) downloads and keeps packages only.
      - C(applied) replaces the packages.
      - C(verified) only checks that the requested versions are installed and run.
      - C(undone) goes back to the packages that were replaced; it fails where the configuration alone was changed.
    type: str
    choices: [prepared, applied, verified, undone]
    required: true
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies in the desired state whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: Reports what it would do by the lists of packages on the machine, and does nothing.
  diff_mode:
    support: full
    description: Shows packages, which packages are kept, files and services.
  platform:
    support: full
    description: Runs on a machine of the inventory with apt.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Download the packages
  gpunodes.bootstrap.runtime_upgrade:
    wanted:
      containerd: "{{ desired_state.wanted.containerd }}"
    state: prepared
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["replace containerd.io 1.7.28-1 by containerd.io 2.1.4-1"]
version:
  description: The installed runtime, as its node reports it.
  returned: always
  type: str
  sample: containerd://2.1.4
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.spec import spec_from
from ..module_utils.runtime_upgrade import upgrade


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "state": {"type": "str", "choices": ["prepared", "applied", "verified", "undone"], "required": True},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given, check = module.params, module.check_mode
        specs = {role: spec_from(each, given["proxy_credentials"]) for role, each in given["wanted"].items()}
        done = upgrade.Outcome()
        if given["state"] == "prepared":
            done = upgrade.prepare(specs, check)
        elif given["state"] == "applied":
            done = upgrade.apply(specs, check)
        elif given["state"] == "undone":
            done = upgrade.undo(specs, check)
        elif not check:
            upgrade.verify(specs)
        return {
            "changed": bool(done.actions),
            "actions": done.actions,
            "diff": done.differences,
            "version": upgrade.running(specs, given["runtime"]),
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
