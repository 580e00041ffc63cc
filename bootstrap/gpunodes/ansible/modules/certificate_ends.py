#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read when the certificates of a node end."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: certificate_ends
short_description: Read when the certificates of a node end
version_added: "0.1.0"
description:
  - Reads the certificates and kubeconfigs that kubeadm and the kubelet keep on a machine.
  - Never changes anything.
options: {}
attributes:
  check_mode:
    support: full
    description: It only reads.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Read the certificates
  gpunodes.bootstrap.certificate_ends:
  register: result
"""

RETURN = r"""
certificates:
  description: >-
    Each certificate: its name, path, subject, end (seconds since 1970; null if it cannot be read, then C(problem) says
    why), and who renews it: C(renew) is C(gpunodes certs renew), C(kubelet) the kubelet itself, C(none) nobody.
  returned: always
  type: list
  elements: dict
  sample: [{name: apiserver, path: /etc/kubernetes/pki/apiserver.crt, subject: kube-apiserver, not_after: 1800000000,
            problem: "", renewal: renew}]
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import certificates
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    carry_out(module, lambda: {"changed": False, "certificates": certificates.report()}, changes=False)


if __name__ == "__main__":
    main()
