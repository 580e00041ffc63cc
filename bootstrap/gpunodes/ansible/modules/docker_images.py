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
  - Docker takes mirrors for docker.io only. containerd fetches the others by its mirrors, and Docker loads them.
  - To O(images) come those that the installed kubeadm names. What is there already costs nothing.
options:
  images:
    description: The images, by their public names.
    type: list
    elements: str
    default: []
  mirrored:
    description: Registries that have a mirror; images of others are left to Docker.
    type: list
    elements: str
    default: []
  control_plane:
    description: Whether all that kubeadm names is wanted, not only what runs on workers.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: none
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Load images into Docker
  docker_images:
    images: [ghcr.io/flannel-io/flannel:v0.26.7]
    mirrored: [ghcr.io, registry.k8s.io]
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import docker_images
from ansible.module_utils.gpunodes.entry import carry_out


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
        wanted = module.params
        actions = docker_images.bring(wanted["images"], wanted["mirrored"], wanted["control_plane"], module.check_mode)
        return {"changed": bool(actions), "actions": actions}

    carry_out(module, work)


if __name__ == "__main__":
    main()
