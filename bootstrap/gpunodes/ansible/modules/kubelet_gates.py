#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read the feature gates with which the kubelets run."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kubelet_gates
short_description: Read the feature gates with which the kubelets run
version_added: "0.1.0"
description:
  - Queries the kubelets of all Ready nodes that gpunodes joined or verified for their configuration (C(/configz)),
    through the API with the administrator's kubeconfig on the machine; several at once, each for a few seconds.
  - Never changes anything, and never fails because of a kubelet or the API.
options: {}
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
- name: Read the feature gates of the kubelets
  gpunodes.bootstrap.kubelet_gates:
  register: result
"""

RETURN = r"""
kubelet_gates:
  description: >-
    C(nodes) has the feature gates that are set for each kubelet, C(silent) why those of others are unknown, and
    C(cluster) the gates in the ConfigMap kubelet-config. C(problem) says why nothing is known.
  returned: always
  type: dict
  sample: {problem: "", cluster: {}, nodes: {worker-1: {InPlacePodVerticalScaling: false}}, silent: {}}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.cluster import kubelet_gates
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    carry_out(module, lambda: {"changed": False, "kubelet_gates": kubelet_gates.report()}, changes=False)


if __name__ == "__main__":
    main()
