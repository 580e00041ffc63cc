#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Load images of mirrored registries into Docker."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: docker_images
short_description: Load images of mirrored registries into Docker
version_added: "0.1.0"
description:
  - Docker supports mirrors for docker.io only. containerd pulls other images through its mirrors; Docker loads them.
  - Also loads the images that the installed kubeadm lists. Skips images that are already present.
options:
  images:
    description: Public names of the images.
    type: list
    elements: str
    default: []
  mirrored:
    description: Registries with a mirror. Images of other registries are skipped; Docker itself pulls them.
    type: list
    elements: str
    default: []
  control_plane:
    description: Whether to load all images that kubeadm lists, not only those that run on workers.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Lists the images that it loads.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Load images into Docker
  gpunodes.bootstrap.docker_images:
    images: [ghcr.io/flannel-io/flannel:v0.26.7]
    mirrored: [ghcr.io, registry.k8s.io]
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
    - before_header: images in Docker
      after_header: images in Docker
      before: {}
      after: {"ghcr.io/flannel-io/flannel:v0.26.7": present}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import docker_images
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "images": {"type": "list", "elements": "str", "default": []},
            "mirrored": {"type": "list", "elements": "str", "default": []},
            "control_plane": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        parameters = module.params
        return docker_images.load_missing(
            parameters["images"], parameters["mirrored"], parameters["control_plane"], module.check_mode
        ).result()

    carry_out(module, work)


if __name__ == "__main__":
    main()
