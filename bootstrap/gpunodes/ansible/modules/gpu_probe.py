#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the health data of a GPU machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_probe
short_description: Read the health data of a GPU machine
version_added: "0.1.0"
description:
  - Reads the kernel log of this boot, threads in uninterruptible sleep, nvidia-smi, PCI state and driver in one run.
  - Ends within its deadline even if the driver hangs. Never starts nvidia-smi while another one is stuck.
  - Never changes anything, and does not load kernel modules. The filter C(gpunodes.bootstrap.health) evaluates
    the result.
options:
  deadline:
    description: Seconds after which the probe ends. With less than 25, a hang that has just begun is not certain.
    type: int
    default: 30
  expected_gpus:
    description: Expected number of GPUs. 0 means the number that the kernel found at boot.
    type: int
    default: 0
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
- name: Probe the machine
  gpunodes.bootstrap.gpu_probe:
    deadline: 40
  register: probe

- name: Report the machine's health
  ansible.builtin.debug:
    msg: "{{ (probe.gpu_probe | gpunodes.bootstrap.health(inventory_hostname)).text }}"
"""

RETURN = r"""
gpu_probe:
  description: The result, a document of the schema gpunodes.probe/1.
  returned: always
  type: dict
  sample: {schema: gpunodes.probe/1, boot_id: 6b1c1f0e-8f5a-4f43-9a43-3d1d5c8a3a11, tasks: [], pci: []}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.probe import document
from ..module_utils.probe.options import ProbeOptions


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "deadline": {"type": "int", "default": 30},
            "expected_gpus": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    options = ProbeOptions(deadline_s=module.params["deadline"], expected_gpus=module.params["expected_gpus"] or None)
    carry_out(module, lambda: {"changed": False, "gpu_probe": document.read(options)}, changes=False)


if __name__ == "__main__":
    main()
