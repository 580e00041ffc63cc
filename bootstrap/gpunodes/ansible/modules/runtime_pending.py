#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read what an upgrade of the container runtime would do."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: runtime_pending
short_description: Read what an upgrade of the container runtime would do
version_added: "0.1.0"
description:
  - Compares the installed container runtime and container toolkit with their desired state, and with the newest
    matching versions in the package sources. The lists of packages are read into a folder that is deleted again.
  - Never changes anything.
options:
  wanted:
    description: >-
      The desired state by role (containerd, docker, cri_dockerd, container_toolkit), each as the module
      M(gpunodes.bootstrap.host) takes it.
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
    description: Runs on a machine of the inventory with apt.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Read what an upgrade would do
  gpunodes.bootstrap.runtime_pending:
    wanted:
      containerd: "{{ desired_state.wanted.containerd }}"
"""

RETURN = r"""
runtime_pending:
  description: >-
    Packages with their old version (empty if they are new) and their new one, and other changes, such as of the
    configuration.
  returned: always
  type: dict
  sample:
    packages: [{name: containerd.io, old: 1.7.28-1, new: 2.1.4-1}]
    changes: [write /etc/containerd/config.toml]
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.spec import spec_from
from ..module_utils.runtime_upgrade import upgrade


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        specs = {role: spec_from(each, given["proxy_credentials"]) for role, each in given["wanted"].items()}
        found, changes = upgrade.pending(specs)
        packages = [{"name": name, "old": found.old.get(name, ""), "new": new} for name, new in found.new.items()]
        return {"changed": False, "runtime_pending": {"packages": packages, "changes": changes}}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
