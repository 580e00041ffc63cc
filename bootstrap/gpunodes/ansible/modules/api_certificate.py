#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Have the API server present a certificate for the endpoint."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: api_certificate
short_description: Have the API server present a certificate for the endpoint
version_added: "0.1.0"
description:
  - Makes the API server's certificate with the endpoint's name besides those that it has, by kubeadm, and restarts the
    API server.
  - The old certificate is in its place until the new one is complete. A run that was interrupted is continued.
options:
  endpoint:
    description: HOST:PORT at which all machines reach the API.
    type: str
    required: true
  given:
    description: Whether the endpoint must lead to this cluster before anything is changed.
    type: bool
    default: false
  timeout:
    description: Seconds to wait for each step.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Lists the actions.
  diff_mode:
    support: full
    description: Shows the differences.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Have the API server present a certificate for the endpoint
  gpunodes.bootstrap.api_certificate:
    endpoint: api.example:6443
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be done.
  returned: always
  type: list
  elements: str
  sample: [make the API server's certificate for api.example too, restart kube-apiserver]
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: names in /etc/kubernetes/pki/apiserver.crt
      after_header: names in /etc/kubernetes/pki/apiserver.crt
      before: {names: [10.0.0.1]}
      after: {names: [10.0.0.1, api.example]}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import api_certificate


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoint": {"type": "str", "required": True},
            "given": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        if given["given"]:
            api_certificate.check_leads(given["endpoint"])
        host = given["endpoint"].rpartition(":")[0]
        return api_certificate.add_names([host], given["timeout"], module.check_mode).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
