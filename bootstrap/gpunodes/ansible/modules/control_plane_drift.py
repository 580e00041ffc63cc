#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Read how a control plane differs from its settings."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: control_plane_drift
short_description: Read how a control plane differs from its settings
version_added: "0.1.0"
description:
  - Compares the manifests of the static pods with those that kubeadm would write now (a dry run of its phases), and
    kubeadm's configuration in the cluster, the audit policy and the names in the API server's certificate with the
    settings. Images are not compared.
  - Never changes anything, and never fails because of the control plane. A machine that gpunodes did not make a control
    plane has no differences, unless O(foreign) is set.
options:
  configuration:
    description: >-
      The sections of kubeadm's ClusterConfiguration (v1beta4) that settings decide: C(extraArgs) of each component, and
      C(extraVolumes) of the API server.
    type: dict
    required: true
  patches:
    description: Patches of the files that kubeadm writes, by name (C(kube-apiserver0+strategic)), as in C(--patches).
    type: dict
    default: {}
  timeouts:
    description: kubeadm's C(timeouts) (v1beta4), one of which it writes into the manifests of the static pods.
    type: dict
    default: {}
  files:
    description: JSON files that the API server reads, by path.
    type: dict
    default: {}
  networks:
    description: C(podSubnet) and C(serviceSubnet) of the settings.
    type: dict
    default: {}
  foreign:
    description: Whether a control plane that gpunodes did not make is compared, too.
    type: bool
    default: false
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
- name: Read how the control plane differs from its settings
  gpunodes.bootstrap.control_plane_drift:
    configuration:
      apiServer: {extraArgs: [{name: v, value: "2"}]}
  register: result
"""

RETURN = r"""
control_plane_drift:
  description: >-
    C(managed) says whether the machine is a control plane of gpunodes, C(problem) why it cannot be compared,
    C(unverified) whether an earlier change of its settings was not verified. Each of the C(differences) has
    C(component), C(name) (an argument, or a path in the pod), C(running) and C(wanted), null where it is not set, and
    C(kind), which is C(settings), C(foreign) for what neither kubeadm nor the settings know, or C(fixed) for what is
    never changed. Long values are shortened. C(left_out) differences are not listed.
  returned: always
  type: dict
  sample: {managed: true, problem: "", unverified: false, left_out: 0, differences: [{component: kube-scheduler,
           name: --v, running: "2", wanted: "4", kind: settings}]}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import compared


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "configuration": {"type": "dict", "required": True},
            "patches": {"type": "dict", "default": {}},
            "timeouts": {"type": "dict", "default": {}},
            "files": {"type": "dict", "default": {}},
            "networks": {"type": "dict", "default": {}},
            "foreign": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        wanted = compared.Wanted(
            given["configuration"], given["patches"], given["files"], given["networks"], given["timeouts"]
        )
        return {"changed": False, "control_plane_drift": compared.report(wanted, foreign=given["foreign"])}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
