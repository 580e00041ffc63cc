#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Test a machine's GPUs before they take work."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_burn_in
short_description: Test a machine's GPUs before they take work
version_added: "0.1.0"
description:
  - Runs C(dcgmi diag) where DCGM is installed, else a CUDA program in a container on each GPU. Xids in the kernel log
    during the test count as failures.
  - A failed test does not fail the task, so that its result can be recorded.
  - A host engine of DCGM that does not run is started for the test only. Nothing else changes, except that the image is
    pulled if it is missing.
  - Tests nothing in check mode.
options:
  level:
    description: The level of C(dcgmi diag).
    type: int
    choices: [1, 2, 3, 4]
    default: 3
  runtime:
    description: Container runtime for the CUDA program.
    type: str
    choices: [containerd, docker]
    default: containerd
  image:
    description: Image with the CUDA program; empty means that a machine without DCGM is refused.
    type: str
    default: ""
  command:
    description: The CUDA program with its arguments.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It tests nothing in check mode, because tests use the GPUs for minutes or hours.
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
- name: Test the GPUs
  gpunodes.bootstrap.gpu_burn_in:
    level: 2
"""

RETURN = r"""
burn_in:
  description: The tool, a summary, the results of its tests, and as sentences what failed or why it was refused.
  returned: always
  type: dict
  sample:
    tool: DCGM 4.2.3 diagnostics, level 2
    summary: 5 tests passed
    results: [{test: memory, gpu: "GPU 0 (0000:3b:00.0)", state: passed, message: ""}]
    failed: ""
    refused: ""
    seconds: 121.3
notes:
  description: The tool and its summary if all tests passed.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import burn_in
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "level": {"type": "int", "choices": [1, 2, 3, 4], "default": 3},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "image": {"type": "str", "default": ""},
            "command": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": False, "burn_in": {}, "notes": []}
        found = burn_in.burn_in(**module.params)
        passed = not found["failed"] and not found["refused"]
        notes = [f"burn-in passed: {found['tool']}: {found['summary']}"] if passed else []
        return {"changed": False, "burn_in": found, "notes": notes}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
