#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Prove a machine's GPUs: its driver answers, and a container gets them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_verify
short_description: Prove a machine's GPUs from its own side
version_added: "0.1.0"
description:
  - Level host is that the module is loaded, the device nodes are there and nvidia-smi lists every GPU of the PCI bus.
  - Level container is that the container runtime gives them to a container.
  - Never changes anything; an image that is missing is pulled. A program that hangs is not waited for.
  - In check mode nothing is looked at.
options:
  image:
    description: An image in which nvidia-smi can run.
    type: str
    required: true
  runtime:
    description: What runs containers.
    type: str
    choices: [containerd, docker]
    default: containerd
  services:
    description: Services that must run.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: partial
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Prove the GPUs on the machine
  gpu_verify:
    image: nvcr.io/nvidia/k8s-device-plugin:v0.19.0
"""

RETURN = r"""
gpu_levels:
  description: The levels that were looked at, in order; the last may have failed.
  returned: always
  type: list
  elements: dict
  sample: [{level: host, state: ok, fact: "driver 580.65.06, 8 x NVIDIA H100 80GB HBM3", wanted: "", remedy: ""}]
labels:
  description: What nvidia-smi says of the GPUs, as labels for the node.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import gpu_verify
from ansible.module_utils.gpunodes.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "services": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": False, "gpu_levels": [], "labels": {}}
        wanted = module.params
        found = gpu_verify.verify(wanted["image"], wanted["runtime"], wanted["services"])
        return {"changed": False, "gpu_levels": found["levels"], "labels": gpu_verify.labels(found)}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
