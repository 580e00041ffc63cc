#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Install, verify or remove an optional add-on of the cluster."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: addon
short_description: Install, verify or remove an optional add-on of the cluster
version_added: "0.1.0"
description:
  - Applies the objects of an add-on with server-side apply, each with the label C(gpunodes.dev/addon) and its name.
    Objects with that label that an earlier version had are deleted.
  - Fails before it changes anything if one of the objects exists without that label.
  - V(absent) deletes the objects with that label, of all kinds. It fails while the add-on is in use.
options:
  name:
    description: Name of the add-on.
    type: str
    default: ""
  state:
    description: >-
      V(present) applies the objects. V(verified) waits until all workloads of the add-on run for a while without a
      restart, and it answers. V(listed) reads which add-ons are installed.
    type: str
    choices: [present, absent, verified, listed]
    default: present
  version:
    description: Version of the add-on.
    type: str
    default: ""
  objects:
    description: The objects of the add-on.
    type: list
    elements: dict
    default: []
  proof:
    description: A C(path) of the API that must answer; with C(items) its list must have an item.
    type: dict
    default: {}
  uses:
    description: >-
      Objects that need the add-on: C(list), their path in the API; C(what), their name in messages; with C(field) and
      C(equals) only those with that value.
    type: list
    elements: dict
    default: []
  argument:
    description: >-
      An argument that API servers must have for V(present): C(name), and C(setting), by which it is decided when the
      cluster is made.
    type: dict
    default: {}
  network:
    description: >-
      Whether the add-on is the network of pods: V(present) installs it only while no node is ready without it.
    type: bool
    default: false
  timeout:
    description: Seconds to wait with V(verified).
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows each object before and after, without the data of Secrets.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Remove an add-on
  gpunodes.bootstrap.addon:
    name: metrics-server
    state: absent
"""

RETURN = r"""
objects:
  description: The objects that changed, or in check mode would change.
  returned: always
  type: list
  elements: str
  sample: ["Deployment metrics-server"]
idle:
  description: Its DaemonSets for which the cluster has no node.
  returned: with V(verified)
  type: list
  elements: str
  sample: [dcgm-exporter]
installed:
  description: The versions of the installed add-ons, by name.
  returned: with V(listed)
  type: dict
  sample: {metrics-server: v0.9.0}
diff:
  description: The differences, as Ansible shows them, with the names of the objects.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import optional, optional_needs
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent", "verified", "listed"], "default": "present"},
            "version": {"type": "str", "default": ""},
            "objects": {"type": "list", "elements": "dict", "default": []},
            "proof": {"type": "dict", "default": {}},
            "uses": {"type": "list", "elements": "dict", "default": []},
            "argument": {"type": "dict", "default": {}},
            "network": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    given = module.params

    def work() -> dict[str, object]:
        if given["state"] == "listed":
            return {"changed": False, "objects": [], "installed": optional.installed()}
        if given["state"] == "verified":
            idle = optional.wait(given["name"], given["proof"], given["timeout"])
            return {"changed": False, "objects": [], "idle": idle}
        if given["state"] == "present":
            optional_needs.check(given["name"], given["argument"], is_network=given["network"])
            changed, shown = optional.up(given["objects"], given["name"], given["version"], module.check_mode)
        else:
            changed, shown = optional.down(given["name"], given["uses"], module.check_mode)
        return {"changed": bool(changed), "objects": changed, "diff": shown}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
