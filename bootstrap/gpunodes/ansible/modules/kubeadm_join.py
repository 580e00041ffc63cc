#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a machine a worker of a cluster, or see that it is one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_join
short_description: Make a machine a worker
version_added: "0.1.0"
description:
  - Runs C(kubeadm join) with a configuration file that only root can read, so that the token is on no command line.
  - A join that was interrupted is cleaned up and started over. A machine of another cluster is refused.
options:
  endpoint:
    description: Host and port of the cluster's API.
    type: str
    required: true
  token:
    description: A bootstrap token; not needed where nothing is to do.
    type: str
    default: ""
  ca_hash:
    description: The pin of the cluster's CA, C(sha256:...).
    type: str
    required: true
  registered:
    description: Whether the cluster has a node for this machine.
    type: bool
    required: true
  settings:
    description: More keys of the JoinConfiguration (v1beta4).
    type: dict
    default: {}
  timeout:
    description: Seconds for kubeadm.
    type: int
    default: 600
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
- name: Join the cluster
  kubeadm_join:
    endpoint: 10.0.0.1:6443
    token: "{{ token }}"
    ca_hash: "{{ cluster.ca_hash }}"
    registered: false
  no_log: true
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import kubeadm
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "ca_hash": {"type": "str", "required": True},
            "registered": {"type": "bool", "required": True},
            "settings": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        wanted = module.params
        actions = kubeadm.join(
            wanted["endpoint"],
            wanted["token"],
            wanted["ca_hash"],
            wanted["registered"],
            wanted["settings"],
            wanted["timeout"],
            module.check_mode,
        )
        return {"changed": bool(actions), "actions": actions}

    carry_out(module, work)


if __name__ == "__main__":
    main()
