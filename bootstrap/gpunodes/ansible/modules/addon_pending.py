#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read what an update of an add-on would change."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: addon_pending
short_description: Read what an update of an add-on would change
version_added: "0.1.0"
description:
  - Compares the DaemonSets of an add-on that is installed in the cluster with its objects. What was never installed is
    left out.
  - Never changes anything.
options:
  objects:
    description: The objects of the add-on.
    type: list
    elements: dict
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
- name: Compare the network add-on with its objects
  gpunodes.bootstrap.addon_pending:
    objects: "{{ lookup('ansible.builtin.template', 'flannel.yml.j2') | from_yaml_all }}"
"""

RETURN = r"""
addons:
  description: >-
    For each DaemonSet its images, the number of nodes by running image, the objects that would change, and the nodes
    whose pod is of an earlier version or does not run.
  returned: always
  type: list
  elements: dict
  sample:
    - name: kube-flannel-ds
      wanted: ["ghcr.io/flannel-io/flannel:v0.26.7"]
      running: {"ghcr.io/flannel-io/flannel:v0.26.1": 3}
      changes: [DaemonSet kube-flannel-ds]
      behind: []
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import addons
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"objects": {"type": "list", "elements": "dict", "required": True}},
        supports_check_mode=True,
    )
    carry_out(module, lambda: {"changed": False, "addons": addons.pending(module.params["objects"])}, changes=False)


if __name__ == "__main__":
    main()
