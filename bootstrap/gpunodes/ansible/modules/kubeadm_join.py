#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a machine a worker of a cluster, unless it is one already."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_join
short_description: Make a machine a worker of a cluster
version_added: "0.1.0"
description:
  - Runs C(kubeadm join) with a configuration file that only root can read. The token is not on the command line.
  - Cleans up an interrupted join and starts again. Refuses a machine of another cluster.
options:
  endpoint:
    description: Host and port of the cluster's API.
    type: str
    required: true
  token:
    description: Bootstrap token. Not required if the machine is already joined.
    type: str
    default: ""
  ca_hash:
    description: Hash of the public key of the cluster's CA, C(sha256:...).
    type: str
    required: true
  registered:
    description: Whether the cluster has a node for this machine.
    type: bool
    required: true
  ended:
    description: >-
      Whether the certificate of its kubelet has ended, and its node is not ready. A worker then joins anew.
    type: bool
    default: false
  settings:
    description: Additional keys of the JoinConfiguration (v1beta4).
    type: dict
    default: {}
  timeout:
    description: Seconds that kubeadm may take.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows kubeadm's configuration, without the token.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Join the cluster
  gpunodes.bootstrap.kubeadm_join:
    endpoint: 10.0.0.1:6443
    token: "{{ token }}"
    ca_hash: "{{ cluster.ca_hash }}"
    registered: false
  no_log: true
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
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
    - before_header: kubeadm
      after_header: kubeadm
      before: {worker: none}
      after: {worker: complete}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm.join import join


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "ca_hash": {"type": "str", "required": True},
            "registered": {"type": "bool", "required": True},
            "ended": {"type": "bool", "default": False},
            "settings": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters = module.params
        return join(
            parameters["endpoint"],
            parameters["token"],
            parameters["ca_hash"],
            parameters["registered"],
            parameters["settings"],
            parameters["timeout"],
            module.check_mode,
            ended=parameters["ended"],
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
