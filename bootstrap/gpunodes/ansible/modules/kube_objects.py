#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Apply objects to the cluster with server-side apply, or delete them, on the control-plane machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kube_objects
short_description: Apply objects to the cluster, or delete them
version_added: "0.1.0"
description:
  - Applies each object in order, with server-side apply.
  - An object counts as changed if it differs from its previous state.
  - With V(absent) deletes the objects, the last one first.
options:
  objects:
    description: The objects.
    type: list
    elements: dict
    required: true
  state:
    description: Whether the objects are to exist.
    type: str
    choices: [present, absent]
    default: present
  label:
    description: >-
      A label, C(name=value), of all objects that belong together. Those of the same kinds and namespaces that are not
      among O(objects) are deleted. Empty for none.
    type: str
    default: ""
  wait:
    description: Seconds to wait until deleted objects are gone; 0 for not at all.
    type: int
    default: 0
  network:
    description: >-
      Whether the objects are the network add-on. Then they are refused if nodes are ready without its DaemonSet:
      another network add-on connects their pods.
    type: bool
    default: false
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
- name: Apply the network add-on
  gpunodes.bootstrap.kube_objects:
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
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: Secret example
      after_header: Secret example
      before: {apiVersion: v1, kind: Secret, metadata: {name: example}, data: {password: "(secret 1)"}}
      after: {apiVersion: v1, kind: Secret, metadata: {name: example}, data: {password: "(secret 2)"}}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import objects
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "objects": {"type": "list", "elements": "dict", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "label": {"type": "str", "default": ""},
            "wait": {"type": "int", "default": 0},
            "network": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given, label, wait = (module.params[key] for key in ("objects", "label", "wait"))
        present = module.params["state"] == "present"
        if module.params["network"]:
            objects.check_network(given)
        changed, differences = objects.apply(given, module.check_mode) if present else ([], [])
        deletes = label or not present
        deleted, gone = objects.delete(given, label, module.check_mode, present, wait) if deletes else ([], [])
        return {"changed": bool(changed or deleted), "objects": changed + deleted, "diff": differences + gone}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
