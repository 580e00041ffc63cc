#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Undo kubeadm's changes on a machine, including leftovers of the network add-on."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_reset
short_description: Undo kubeadm's changes
version_added: "0.1.0"
description:
  - Stops the kubelet, removes the pods and unmounts the kubelet's mounts. Then removes the folders of kubeadm and
    kubelet, the CNI configuration, firewall rules and network links.
  - Refuses to remove anything while something stays mounted in those folders.
  - Refuses a machine that gpunodes did not join, unless it belongs to the cluster with O(ca_hash).
  - On a control plane this destroys the cluster.
options:
  ca_hash:
    description: >-
      SHA-256 hash of the CA of the cluster that the machine leaves, as in C(cluster_info). Empty if it leaves none.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: partial
    description: Lists the folders, files, network links and mounts that it removes.
    details: Pods, containers and firewall rules are not listed.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Undo kubeadm's changes
  gpunodes.bootstrap.kubeadm_reset:
    ca_hash: "{{ cluster.ca_hash }}"
"""

RETURN = r"""
actions:
  description: What was removed, or in check mode would be removed.
  returned: always
  type: list
  elements: str
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: changes of kubeadm
      after_header: changes of kubeadm
      before: {/etc/kubernetes: present, link cni0: present}
      after: {}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import undo
from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import reset


def main() -> None:
    module = AnsibleModule(argument_spec={"ca_hash": {"type": "str", "default": ""}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        remains = reset.remains(module.params["ca_hash"])
        # host_undo runs after this module: its refusals are checked now, so that the reset does not stop halfway.
        undo.Undoer(check=True).check_unmounted()
        if remains and not module.check_mode:
            reset.reset(module.params["ca_hash"])
        return reset.report(remains).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
