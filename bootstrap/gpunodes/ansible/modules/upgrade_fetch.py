#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Fetch what an upgrade of Kubernetes installs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: upgrade_fetch
short_description: Fetch what an upgrade of Kubernetes installs
version_added: "0.1.0"
description:
  - Configures package sources, downloads packages, and pulls images, while the machine's pods still run.
  - Installs and restarts nothing. Records the package sources in the ledger on the machine.
options:
  wanted:
    description: >-
      The C(repositories), C(packages) and C(proxies) of a desired state, as M(gpunodes.bootstrap.host) takes them.
    type: dict
    required: true
  images:
    description: Images that containerd pulls.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that pulling one image may take.
    type: int
    default: 1200
  proxy_credentials:
    description: USER:PASSWORD for the proxies whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows files, packages and images.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Fetch the packages and images
  gpunodes.bootstrap.upgrade_fetch:
    wanted:
      packages:
        - name: kubelet
          version: 1.36.3-*
          replace: true
    images: [registry.k8s.io/kube-proxy:v1.36.3]
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
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.spec import spec_from
from ..module_utils.upgrade_fetch import fetch


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "images": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 1200},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        spec = spec_from(given["wanted"], given["proxy_credentials"])
        changes = fetch(spec, given["images"], given["timeout"], module.check_mode)
        return {"changed": bool(changes.actions), "actions": changes.actions, "diff": changes.differences}

    carry_out(module, work)


if __name__ == "__main__":
    main()
