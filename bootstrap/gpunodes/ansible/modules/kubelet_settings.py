#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the settings with which the kubelets run."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubelet_settings
short_description: Read the settings with which the kubelets run
version_added: "0.1.0"
description:
  - Queries the kubelets of all Ready nodes that gpunodes joined or verified for their configuration (C(/configz)),
    through the API with the administrator's kubeconfig on the machine; several at once, all of them for a few seconds.
  - Never changes anything, and never fails because of a kubelet or the API.
options:
  fields:
    description: Fields of the configuration to report.
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
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Read the settings of the kubelets
  gpunodes.bootstrap.kubelet_settings:
    fields: [featureGates, podPidsLimit]
  register: result
"""

RETURN = r"""
kubelet_settings:
  description: >-
    C(nodes) has the fields of each kubelet, each as JSON, C(silent) why those of others are unknown, and C(cluster) the
    fields of the ConfigMap kubelet-config. C(problem) says why nothing is known.
  returned: always
  type: dict
  sample: {problem: "", cluster: {}, nodes: {worker-1: {podPidsLimit: "16384"}}, silent: {}}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import kubelet_settings
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={"fields": {"type": "list", "elements": "str", "default": []}}, supports_check_mode=True
    )
    fields = module.params["fields"]
    carry_out(module, lambda: {"changed": False, "kubelet_settings": kubelet_settings.report(fields)}, changes=False)


if __name__ == "__main__":
    main()
