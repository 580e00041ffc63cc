#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bring a control plane to its settings."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: control_plane_settings
short_description: Bring a control plane to its settings
version_added: "0.1.0"
description:
  - Changes what the module M(gpunodes.bootstrap.control_plane_drift) reports, except what is never changed - first
    kubeadm's configuration in the cluster, then one static pod after another, each with a wait until it is ready.
  - If a static pod does not become ready, everything gets its earlier state back, and the task fails. C(undone)
    brings the earlier state back, too, until the new one is C(verified). A run that was interrupted is continued.
  - Images and versions stay.
options:
  state:
    description: >-
      C(checked) changes nothing, and fails if kubeadm refuses the settings. C(applied) changes what differs.
      C(verified) fails if something differs or is not ready, and forgets the earlier state. C(undone) brings that back.
    type: str
    choices: [checked, applied, verified, undone]
    default: applied
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
    description: JSON files that the API server reads, by path. They are readable by root only.
    type: dict
    default: {}
  timeout:
    description: Seconds that the restart of one static pod may take.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the arguments and other values that change.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Bring the control plane to its settings
  gpunodes.bootstrap.control_plane_settings:
    configuration:
      apiServer: {extraArgs: [{name: v, value: "2"}]}
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: [change kubeadm's configuration in the cluster, restart kube-scheduler with its settings]
diff:
  description: The differences, as Ansible shows them.
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: settings of kube-scheduler
      after_header: settings of kube-scheduler
      before: {--v: "2"}
      after: {--v: "4"}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import compared, settings


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["checked", "applied", "verified", "undone"], "default": "applied"},
            "configuration": {"type": "dict", "required": True},
            "patches": {"type": "dict", "default": {}},
            "timeouts": {"type": "dict", "default": {}},
            "files": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        if given["state"] == "undone":
            return settings.undo(given["timeout"], module.check_mode).result()
        wanted = compared.Wanted(given["configuration"], given["patches"], given["files"], timeouts=given["timeouts"])
        if given["state"] == "verified":
            return settings.verify(wanted, module.check_mode).result()
        if given["state"] == "checked":
            return {**settings.apply(wanted, given["timeout"], check=True).result(), "changed": False}
        return settings.apply(wanted, given["timeout"], module.check_mode).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
