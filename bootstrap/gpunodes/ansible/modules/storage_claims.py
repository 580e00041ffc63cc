#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Verify that claims of shared storage are bound, and that pods on two nodes write and read there."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: storage_claims
short_description: Verify that claims of shared storage are bound, and that pods use them
version_added: "0.1.0"
description:
  - Waits until each claim is bound.
  - Then a pod on one node writes a file into each share, and a pod on another node reads it.
  - The pods and their files are removed at the end.
  - Runs on the control-plane machine.
options:
  claims:
    description: The claims, each with C(namespace) and C(name). Of several with the same name, pods use the first one.
    type: list
    elements: dict
    required: true
  image:
    description: Image of the pods, which must contain busybox. Without one no pod is started.
    type: str
    default: ""
  timeout:
    description: Seconds to wait for the claims, and for each pod.
    type: int
    default: 300
attributes:
  check_mode:
    support: partial
    description: Does nothing and returns an empty result.
    details: It verifies nothing in check mode, because that needs pods.
  diff_mode:
    support: none
    description: Changes nothing that stays.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Verify the claims
  gpunodes.bootstrap.storage_claims:
    claims:
      - namespace: default
        name: training
    image: registry.k8s.io/e2e-test-images/busybox:1.37.0-1
"""

RETURN = r"""
notes:
  description: What was verified, and what was not, one sentence each.
  returned: always
  type: list
  elements: str
  sample: ["training: gpu-1 wrote, gpu-2 read"]
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import storage
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "claims": {"type": "list", "elements": "dict", "required": True},
            "image": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.check_mode:
            return {"changed": False, "notes": []}
        given = [(each["namespace"], each["name"]) for each in module.params["claims"]]
        return {"changed": False, "notes": storage.verify(given, module.params["image"], module.params["timeout"])}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
