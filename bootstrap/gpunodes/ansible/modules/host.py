#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bring packages, files, kernel settings and services of a machine into their desired state."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host
short_description: Bring a machine into its desired state
version_added: "0.1.0"
description:
  - Manages package sources with pinned keys, packages at exact versions, whole files, the kernel, swap and services.
  - Records each change and the previous state in a ledger on the machine. M(host_undo) undoes the changes.
  - The next run completes an interrupted one.
options:
  wanted:
    description:
      - The desired state, with the fields of C(Spec) in C(module_utils/host.py). They are described there.
    type: dict
    required: true
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the changes.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Install containerd
  host:
    wanted:
      packages:
        - name: containerd
          hold: true
      files:
        - path: /etc/containerd/config.toml
          package: containerd
          contents:
            1.*: "version = 2"
            2.*: "version = 3"
      services:
        - name: containerd
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["install containerd 1.7.24~ds1-6", "write /etc/containerd/config.toml"]
versions:
  description: Versions of the packages.
  returned: always
  type: dict
reboot:
  description: Why the machine must be rebooted to complete the changes; empty if no reboot is required.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.converge import converge
from ..module_utils.host.spec import spec_from


def main() -> None:
    module = AnsibleModule(argument_spec={"wanted": {"type": "dict", "required": True}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        changes = converge(spec_from(module.params["wanted"]), module.check_mode)
        return {
            "changed": bool(changes.actions),
            "actions": changes.actions,
            "diff": changes.differences,
            "versions": changes.versions,
            "reboot": changes.reboot,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
