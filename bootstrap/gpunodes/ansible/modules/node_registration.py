#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Complete the node of a machine whose pool scales."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_registration
short_description: Complete the node of a machine whose pool scales
version_added: "0.1.0"
description:
  - Sets the providerID of a node that registered before its pool scaled, or removes the taint C(gpunodes.dev/starting)
    of a node that is verified. A node that does not exist is left to its kubelet.
  - Fails if the node has another providerID, which the API never changes.
  - Runs on the control-plane machine.
options:
  node:
    description: The node's name.
    type: str
    required: true
  provider_id:
    description: Its providerID. If empty, it is not set.
    type: str
    default: ""
  started:
    description: Remove the taint.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reports what would change.
  diff_mode:
    support: full
    description: Shows the providerID and the taint.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Set the providerID
  gpunodes.bootstrap.node_registration:
    node: gpu-1
    provider_id: gpunodes://gpu-1
"""

RETURN = r"""
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import registration
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "required": True},
            "provider_id": {"type": "str", "default": ""},
            "started": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters, check = module.params, module.check_mode
        provider_id = parameters["provider_id"]
        differences = registration.identify(parameters["node"], provider_id, check) if provider_id else []
        differences += registration.start(parameters["node"], check) if parameters["started"] else []
        return {"changed": bool(differences), "diff": differences}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
