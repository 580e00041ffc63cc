#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Take kubeadm's work on a machine back, and what the network add-on left."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_reset
short_description: Take kubeadm's work back
version_added: "0.1.0"
description:
  - Stops the kubelet, removes the pods, unmounts what the kubelet has mounted, then removes the folders of both, CNI
    configuration, firewall rules and links.
  - Refuses, before it removes anything, while something stays mounted in those folders.
  - On a control plane this destroys the cluster.
options: {}
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Take kubeadm's work back
  kubeadm_reset:
"""

RETURN = r"""
actions:
  description: What was taken away, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import kubeadm, undo
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)

    def work() -> dict[str, object]:
        found = kubeadm.remains()
        # The rest of a reset comes after this, and must not refuse when half of it is done.
        undo.Undoer(check=True).see_bare()
        if found and not module.check_mode:
            kubeadm.reset()
        return {"changed": bool(found), "actions": [f"remove {thing}" for thing in found]}

    carry_out(module, work)


if __name__ == "__main__":
    main()
