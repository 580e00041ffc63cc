#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make a machine another control plane of a cluster, unless it is one already."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubeadm_join_control_plane
short_description: Make a machine another control plane of a cluster
version_added: "0.1.0"
description:
  - Runs C(kubeadm join) with a configuration file that only root can read. Token and certificate key are not on the
    command line.
  - Resets an interrupted join and starts again. Refuses a machine of another cluster, a worker, and a machine that was
    a complete control plane and is none now.
options:
  endpoint:
    description: Host and port of the cluster's API.
    type: str
    required: true
  ca_hash:
    description: Hash of the public key of the cluster's CA, C(sha256:...).
    type: str
    required: true
  token:
    description: Bootstrap token. Not required if the machine has joined already, as the certificate key.
    type: str
    default: ""
  certificate_key:
    description: Key of the certificates that M(gpunodes.bootstrap.join_certificates) uploaded.
    type: str
    default: ""
  files:
    description: Files of the API server that this module returned, by path. They are readable by root only.
    type: dict
    default: {}
  required_files:
    description: Other files that the machine must have, since the API server is started with them.
    type: list
    elements: str
    default: []
  node:
    description: Name of the machine's node.
    type: str
    required: true
  address:
    description: IP address at which the machine's API server and etcd are reached.
    type: str
    required: true
  registered:
    description: Whether the cluster has the machine's node, as that of a control plane.
    type: bool
    required: true
  schedulable:
    description: Whether ordinary pods may run on it, as in M(gpunodes.bootstrap.kubeadm_init).
    type: bool
    default: false
  patches:
    description: Patches of the files that kubeadm writes, by name, as in M(gpunodes.bootstrap.kubeadm_init).
    type: dict
    default: {}
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
    description: Shows kubeadm's configuration, without secrets.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Join as a control plane
  gpunodes.bootstrap.kubeadm_join_control_plane:
    endpoint: 10.0.0.10:6443
    ca_hash: "{{ cluster.ca_hash }}"
    token: "{{ created.token }}"
    certificate_key: "{{ shared.key }}"
    files: "{{ shared.files }}"
    node: control-2
    address: 10.0.0.2
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
      before: {control plane: none}
      after: {control plane: complete}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm.certificates import Shared
from ..module_utils.kubeadm.join_control_plane import Cluster, Place, join


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "ca_hash": {"type": "str", "required": True},
            "token": {"type": "str", "default": "", "no_log": True},
            "certificate_key": {"type": "str", "default": "", "no_log": True},
            "files": {"type": "dict", "default": {}, "no_log": True},
            "required_files": {"type": "list", "elements": "str", "default": []},
            "node": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "registered": {"type": "bool", "required": True},
            "schedulable": {"type": "bool", "default": False},
            "patches": {"type": "dict", "default": {}},
            "settings": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        return join(
            Cluster(given["endpoint"], given["ca_hash"], given["token"]),
            Place(given["node"], given["address"], given["registered"], given["schedulable"]),
            Shared(given["certificate_key"], given["files"], given["required_files"]),
            given["patches"],
            given["settings"],
            given["timeout"],
            module.check_mode,
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
