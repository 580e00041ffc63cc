#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the facts of a machine that preflight needs, in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_facts
short_description: Read the facts of a machine that preflight needs
version_added: "0.1.0"
description:
  - Reads the operating system, hardware, network, packages and cluster membership of a machine in one run.
  - Checks that outside sources are reachable and that their keys have the expected fingerprints.
  - Never changes anything.
options:
  sources:
    description: Outside sources to check meanwhile.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the source in the result.
        type: str
        required: true
      url:
        description: >-
          Address. C({system}) (debian, ubuntu, rhel), C({format}) (deb, rpm), C({codename}), C({release}) and the names
          of the architecture are replaced.
        type: str
        required: true
      kind:
        description: Kind of source. A registry that requires a login counts as reachable.
        type: str
        choices: [packages, registry]
        default: packages
      key:
        description: Armoured key of a package source, or its address.
        type: str
      fingerprint:
        description: The key's fingerprint.
        type: str
      suite:
        description: The suite of a Debian source; C(/) for a flat one.
        type: str
        default: /
      index:
        description: >-
          Folder of the index of packages beside the release file of a Debian source, such as
          C(stable/binary-{package_arch}/); empty for a flat one.
        type: str
        default: ""
      gpus:
        description: Check it only on machines with NVIDIA GPUs.
        type: bool
        default: false
      systems:
        description: Check it only on these systems (C(debian 12)); empty for all.
        type: list
        elements: str
        default: []
  proxies:
    description: >-
      HTTP proxies through which the sources are reached: the URLs C(http) and C(https), and C(no_proxy), the hosts that
      are reached directly.
    type: dict
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
  data_directory:
    description: Directory on another disk for the data of containerd, Docker and the kubelet; empty for none.
    type: str
    default: ""
  runtime:
    description: Container runtime whose data belongs there.
    type: str
    choices: [containerd, docker]
    default: containerd
  expected_gpus:
    description: >-
      PCI device ids of the GPUs of machines that will boot a copy of this disk. A machine without GPUs reports them,
      and what is needed to install their software.
    type: list
    elements: str
    default: []
  exact_packages:
    description: >-
      Names of packages of which a version is requested, by the name of their source. The versions of those that are
      not installed are reported. The source C(system) stands for all that the machine has; it is not read if the
      machine uses the source C(docker).
    type: dict
    default: {}
  vip:
    description: Virtual address of the control planes; empty for none.
    type: str
    default: ""
  api_servers:
    description: HOST:PORT of API servers to connect to; the machine reports which it reaches.
    type: list
    elements: str
    default: []
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
- name: Read the machine
  gpunodes.bootstrap.host_facts:
    sources:
      - name: kubernetes
        url: https://pkgs.k8s.io/core:/stable:/v1.36/{format}/
        key: https://pkgs.k8s.io/core:/stable:/v1.36/deb/Release.key
  register: machine
"""

RETURN = r"""
host_facts:
  description: The facts. A fact that cannot be determined is null.
  returned: always
  type: dict
  sample: {os: {id: debian, version: "13", codename: trixie}, arch: x86_64, cpus: 2, memory_mib: 3924}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import facts
from ..module_utils.entry import carry_out
from ..module_utils.proxies import proxies_from

SOURCE = {
    "name": {"type": "str", "required": True},
    "url": {"type": "str", "required": True},
    "kind": {"type": "str", "choices": ["packages", "registry"], "default": "packages"},
    "key": {"type": "str", "no_log": False},
    "fingerprint": {"type": "str"},
    "suite": {"type": "str", "default": "/"},
    "index": {"type": "str", "default": ""},
    "gpus": {"type": "bool", "default": False},
    "systems": {"type": "list", "elements": "str", "default": []},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sources": {"type": "list", "elements": "dict", "options": SOURCE, "default": []},
            "proxies": {"type": "dict"},
            "proxy_credentials": {"type": "dict", "no_log": True},
            "data_directory": {"type": "str", "default": ""},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "expected_gpus": {"type": "list", "elements": "str", "default": []},
            "exact_packages": {"type": "dict", "default": {}},
            "vip": {"type": "str", "default": ""},
            "api_servers": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        proxies = proxies_from(given["proxies"], given["proxy_credentials"])
        others = (given["data_directory"], given["runtime"], given["expected_gpus"])
        more = {name: given[name] for name in ("exact_packages", "vip", "api_servers")}
        return {"changed": False, "host_facts": facts.read(given["sources"], proxies, *others, **more)}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
