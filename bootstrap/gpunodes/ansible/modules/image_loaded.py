#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Load an image into the container runtime from an archive, or remove it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: image_loaded
short_description: Load an image into the container runtime from an archive
version_added: "0.1.0"
description:
  - Loads an image into containerd, or into Docker where the kubelet uses it, unless it is there with one of O(digests).
  - Without O(archive) it only checks that.
  - With V(absent) removes all images of a repository.
options:
  state:
    description: Whether to load the image, or to remove the images of a repository.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the image with its tag; with V(absent) a name without tag.
    type: str
    required: true
  digests:
    description: Digests of its manifest and of its configuration.
    type: list
    elements: str
    default: []
  archive:
    description: Archive of the image on this machine. It is deleted when the image is loaded.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Lists the images that it loads or removes.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Load an image
  gpunodes.bootstrap.image_loaded:
    name: gpunodes.dev/gpunodes:0.1.0
    digests: ["sha256:dc39fd8ada1ee13dc2625ea64d240b2b1186bcbf01b754fd16937c71f3de6d10"]
    archive: /var/lib/gpunodes/image.oci.tar
"""

RETURN = r"""
loaded:
  description: Whether the runtime had the image at the start.
  returned: with O(state=present)
  type: bool
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
      before: {"gpunodes.dev/gpunodes:0.1.0": missing}
      after: {"gpunodes.dev/gpunodes:0.1.0": "sha256:dc39fd8ada1ee13dc2625ea64d240b2b1186bcbf01b754fd16937c71f3de6d10"}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import image_loaded
from ..module_utils.entry import carry_out
from ..module_utils.report import Report


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "name": {"type": "str", "required": True},
            "digests": {"type": "list", "elements": "str", "default": []},
            "archive": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        name, digests, archive = (module.params[key] for key in ("name", "digests", "archive"))
        if module.params["state"] == "absent":
            return image_loaded.remove(name, module.check_mode).result()
        loaded = image_loaded.is_loaded(name, digests)
        report = image_loaded.load(name, digests, archive, module.check_mode) if archive else Report()
        return {**report.result(), "loaded": loaded}

    carry_out(module, work)


if __name__ == "__main__":
    main()
