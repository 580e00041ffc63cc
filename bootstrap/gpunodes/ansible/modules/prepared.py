#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Complete a machine that is prepared but joins later, perhaps as a copy of its disk."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: prepared
short_description: Complete a machine that joins later, perhaps as a copy of its disk
version_added: "0.1.0"
description:
  - Waits until the container runtime has all images that a node needs, and pulls those that are missing.
  - Removes the ids that containerd and Docker gave this machine, if gpunodes installed them. They make new ones.
  - Leaves the system's own identity, such as C(/etc/machine-id) and SSH host keys.
options:
  images:
    description: The images. C({kubelet}) in a name is the version of the installed kubelet.
    type: list
    elements: str
    default: []
  runtime:
    description: The container runtime. With Docker the images that kubeadm lists are pulled, too.
    type: str
    choices: [containerd, docker]
    default: containerd
  control_plane:
    description: Whether kubeadm's images are those of a control plane.
    type: bool
    default: false
  timeout:
    description: Seconds that pulling images may take.
    type: int
    default: 1800
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the images, and the files with ids.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Complete the machine
  gpunodes.bootstrap.prepared:
    images: [registry.k8s.io/pause:3.10, "registry.k8s.io/kube-proxy:v{kubelet}"]
"""

RETURN = r"""
actions:
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: images
      after_header: images
      before: {}
      after: {"registry.k8s.io/pause:3.10": present}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import prepared
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "images": {"type": "list", "elements": "str", "default": []},
            "runtime": {"type": "str", "choices": ["containerd", "docker"], "default": "containerd"},
            "control_plane": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        given = module.params
        return prepared.complete(
            given["images"], given["runtime"], given["control_plane"], given["timeout"], module.check_mode
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
