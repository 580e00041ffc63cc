#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Verify a machine's GPUs: its driver responds, and a container gets them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_verify
short_description: Verify a machine's GPUs on the machine
version_added: "0.1.0"
description:
  - Level host checks that the kernel module is loaded, the device nodes exist and nvidia-smi lists every GPU on the PCI
    bus.
  - Level container checks that a container gets the GPUs.
  - Never changes anything, except that it pulls the image if it is missing. Does not wait for hung programs.
  - Verifies nothing in check mode.
options:
  image:
    description: Image in which nvidia-smi can run.
    type: str
    required: true
  runtime:
    description: Container runtime.
    type: str
    choices: [containerd, docker]
    default: containerd
  services:
    description: Services that must run.
    type: list
    elements: str
    default: []
  mig:
    description: The MIG instances that each GPU must have, by profile; empty for no check.
    type: dict
    default: {}
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It verifies nothing in check mode, because that needs pods or an image.
  diff_mode:
    support: none
    description: Changes nothing but the image that it may pull.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Verify the GPUs on the machine
  gpunodes.bootstrap.gpu_verify:
    image: nvcr.io/nvidia/k8s-device-plugin:v0.19.0
"""

RETURN = r"""
gpu_levels:
  description: Results of the checked levels, in order. Only the last one can be a failure.
  returned: always
  type: list
  elements: dict
  sample: [{level: host, state: ok, fact: "driver 580.65.06, 8 x NVIDIA H100 80GB HBM3", wanted: "", remedy: ""}]
labels:
  description: Node labels derived from nvidia-smi's output.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpu_mig, gpu_verify
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "required": True},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "services": {"type": "list", "elements": "str", "default": []},
            "mig": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": False, "gpu_levels": [], "labels": {}}
        parameters = module.params
        found = gpu_verify.verify(parameters["image"], parameters["runtime"], parameters["services"])
        levels = gpu_mig.checked(found["levels"], {name: int(count) for name, count in parameters["mig"].items()})
        return {"changed": False, "gpu_levels": levels, "labels": gpu_verify.labels(found)}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
