#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Renew the certificates of a control plane."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: certificates_renewed
short_description: Renew the certificates of a control plane
version_added: "0.1.0"
description:
  - Runs C(kubeadm certs renew all) if a certificate has less than nine tenths of its time left.
  - Then restarts each static pod that is older than one of its certificates, one at a time, and checks that the API
    server and etcd serve the new ones. So a run after an interruption continues.
  - Fails before that where the restart of etcd would stop the cluster because other members do not work, unless a
    certificate ends within 30 days.
  - Never renews a certificate authority.
options:
  ended_only:
    description:
      - Whether only the files are renewed, and those only if the certificate has ended, or ends within the hour, that
        members of etcd accept each other with. Nothing is restarted.
      - With it on all control planes etcd has its quorum again, which a restart of one after the other needs.
    type: bool
    default: false
  force:
    description: Whether certificates are renewed that have more time left.
    type: bool
    default: false
  timeout:
    description: Seconds that the restart of one static pod may take.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows when the certificates end, and which static pods are restarted.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Renew the certificates
  gpunodes.bootstrap.certificates_renewed:
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
    - before_header: certificates
      after_header: certificates
      before: {apiserver.crt: ends 2027-01-01 00:00 UTC}
      after: {apiserver.crt: renewed}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import renewal
from ..module_utils.report import Report


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "ended_only": {"type": "bool", "default": False},
            "force": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    carry_out(module, lambda: _renewed(module).result())


def _renewed(module: AnsibleModule) -> Report:
    if module.params["ended_only"]:
        return renewal.renew_ended(module.check_mode)
    return renewal.renew(module.params["force"], module.params["timeout"], module.check_mode)


if __name__ == "__main__":
    main()
