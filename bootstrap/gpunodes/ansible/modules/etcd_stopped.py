#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Stop the control plane for a restore of etcd."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: etcd_stopped
short_description: Stop the control plane for a restore of etcd
version_added: "0.1.0"
description:
  - Moves the manifests of the API server, controller manager, scheduler and etcd away, and waits until they have ended.
  - Refuses a machine of another cluster than that of the backup, and one whose etcd is older than the backup's.
options:
  snapshot:
    description: SHA-256 of the snapshot, in hexadecimal.
    type: str
    required: true
  ca_hash:
    description: Pin of the CA of the backup's cluster, as in C(kubeadm join).
    type: str
    required: true
  etcd_version:
    description: Version of the backup's etcd.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Lists the static pods that it stops.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Stop the control plane
  gpunodes.bootstrap.etcd_stopped:
    snapshot: "{{ 'a' * 64 }}"
    ca_hash: "sha256:{{ 'b' * 64 }}"
    etcd_version: 3.6.8
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
    - before_header: static pods
      after_header: static pods
      before: {etcd: runs}
      after: {etcd: stopped}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import etcd_restore
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "snapshot": {"type": "str", "required": True},
            "ca_hash": {"type": "str", "required": True},
            "etcd_version": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    arguments = (given["snapshot"], given["ca_hash"], given["etcd_version"])
    carry_out(module, lambda: etcd_restore.stop(*arguments, module.check_mode).result())


if __name__ == "__main__":
    main()
