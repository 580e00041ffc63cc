#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Update an add-on of the cluster, and go back if its pods do not run."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: addon_upgrade
short_description: Update an add-on of the cluster, and go back if its pods do not run
version_added: "0.1.0"
description:
  - Applies the objects of an add-on that is installed, with server-side apply, and waits until the pods of its
    DaemonSets run on all nodes, and nodes offer as many GPUs as before. Otherwise the earlier objects are applied
    again.
  - What was never installed is not installed.
options:
  objects:
    description: The objects of the add-on.
    type: list
    elements: dict
    required: true
  timeout:
    description: Seconds in which no further node has pods that run, after which the update has failed.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows each object before and after.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Update the network add-on
  gpunodes.bootstrap.addon_upgrade:
    objects: "{{ lookup('ansible.builtin.template', 'flannel.yml.j2') | from_yaml_all }}"
"""

RETURN = r"""
objects:
  description: The objects that changed, or in check mode would change.
  returned: always
  type: list
  elements: str
  sample: ["DaemonSet kube-flannel-ds"]
diff:
  description: The differences, as Ansible shows them, with the names of the objects.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import addons
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "objects": {"type": "list", "elements": "dict", "required": True},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        changed, differences = addons.upgrade(module.params["objects"], module.params["timeout"], module.check_mode)
        return {"changed": bool(changed), "objects": changed, "diff": differences}

    carry_out(module, work)


if __name__ == "__main__":
    main()
