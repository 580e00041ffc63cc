#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read what an upgrade of Kubernetes depends on."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: upgrade_facts
short_description: Read what an upgrade of Kubernetes depends on
version_added: "0.1.0"
description:
  - Reads versions, arguments and feature gates of Kubernetes on a machine, and the versions in its package source.
  - On a control plane also reads its cluster, with the administrator's kubeconfig on the machine.
  - Never changes anything.
options:
  url:
    description: >-
      The package source of the requested minor; C({format}) is replaced by deb or rpm. If empty, none is read.
    type: str
    default: ""
  requested:
    description: The requested version, a minor or an exact one.
    type: str
    default: ""
  images:
    description: >-
      Images that the machine would fetch, with C({version}) for the exact version. Those that containerd does not have
      are looked for in their registries.
    type: list
    elements: str
    default: []
  mirrors:
    description: URLs of mirrors by the names of registries.
    type: dict
    default: {}
  cluster:
    description: Whether to read the cluster, too.
    type: bool
    default: false
  patches:
    description: >-
      Patches with which kubeadm will write manifests, by name (C(kube-apiserver0+strategic)). A control plane that
      others made is compared with what kubeadm would write.
    type: dict
    default: {}
  timeouts:
    description: kubeadm's C(timeouts) (v1beta4), one of which it writes into these manifests.
    type: dict
    default: {}
  proxies:
    description: The machine's HTTP proxies, with C(http), C(https) and C(no_proxy).
    type: dict
  proxy_credentials:
    description: USER:PASSWORD for the proxies whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
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
- name: Read what an upgrade depends on
  gpunodes.bootstrap.upgrade_facts:
    cluster: true
  register: result
"""

RETURN = r"""
upgrade_facts:
  description: The versions, the names of arguments, the feature gates, and the cluster; null without C(cluster).
  returned: always
  type: dict
  sample: {kubeadm: 1.36.3, kubelet: 1.36.3, images: {kube-apiserver: v1.36.3, etcd: 3.6.8-0}}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import upgrade_facts
from ..module_utils.entry import carry_out
from ..module_utils.proxies import proxies_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": ""},
            "requested": {"type": "str", "default": ""},
            "images": {"type": "list", "elements": "str", "default": []},
            "mirrors": {"type": "dict", "default": {}},
            "cluster": {"type": "bool", "default": False},
            "patches": {"type": "dict", "default": {}},
            "timeouts": {"type": "dict", "default": {}},
            "proxies": {"type": "dict"},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        sources = upgrade_facts.Sources(
            given["url"],
            given["requested"],
            given["images"],
            given["mirrors"],
            proxies_from(given["proxies"], given["proxy_credentials"]),
        )
        found = upgrade_facts.read(sources, given["cluster"], given["patches"], given["timeouts"])
        return {"changed": False, "upgrade_facts": found}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
