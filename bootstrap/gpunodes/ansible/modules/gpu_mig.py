#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Slice the GPUs of a machine into MIG instances."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_mig
short_description: Slice the GPUs of a machine into MIG instances
version_added: "0.1.0"
description:
  - Turns the MIG mode of all GPUs on, and makes the instances of a layout; changes nothing if they have it.
  - A systemd unit makes them again after a boot and after a reset of a GPU.
  - Without a layout, takes away the instances that this module made, turns MIG off, and removes the unit. Instances of
    others stay.
  - Changes nothing while a process uses a GPU, and never resets a GPU itself.
options:
  wanted:
    description: The desired state of the unit, as the module host gets it.
    type: dict
    required: true
  layout:
    description: Number of instances of each GPU, by profile.
    type: dict
    required: true
  state:
    description: C(compared) changes nothing, and returns whether instances must be changed.
    type: str
    choices: [compared, applied]
    default: applied
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the instances of each GPU, and files.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Slice the GPUs
  gpunodes.bootstrap.gpu_mig:
    wanted: "{{ desired_state.gpu.wanted.gpu_mig }}"
    layout: {1g.10gb: 7}
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["slice 8 GPUs into 7 x 1g.10gb"]
differs:
  description: Whether the instances of a GPU differ from the layout.
  returned: with O(state=compared)
  type: bool
reboot:
  description: Why the machine must be rebooted to complete the changes; empty if no reboot is required.
  returned: always
  type: str
diff:
  description: The instances of each GPU before and after, and files.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpu_mig
from ..module_utils.entry import carry_out
from ..module_utils.host import gpu_driver
from ..module_utils.host.spec import spec_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "layout": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["compared", "applied"], "default": "applied"},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        layout = {str(name): int(count) for name, count in module.params["layout"].items()}
        if module.params["state"] == "compared":
            # A driver that a dry run did not install lists no GPUs.
            loaded = os.path.exists(f"{gpu_driver.SYS}/module/nvidia")
            return {"changed": False, "actions": [], "reboot": "", "differs": loaded and gpu_mig.differs(layout)}
        done = gpu_mig.bring(spec_from(module.params["wanted"]), layout, module.check_mode)
        return {
            "changed": bool(done.actions),
            "actions": done.actions,
            "diff": done.differences,
            "reboot": done.reboot,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
