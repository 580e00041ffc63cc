#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Check that nobody uses the NFS server of a machine, before it is taken away."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nfs_unused
short_description: Check that nobody uses the NFS server of a machine, before it is taken away
version_added: "0.1.0"
description:
  - >-
    Fails if a client is connected to the server, or has state of NFS 4 there, whatever it mounted, and by which name.
  - Does nothing if the server was there before gpunodes, since it then stays.
  - Never changes anything.
options:
  timeout:
    description: Seconds to wait. The lease of a client that did not say goodbye ends after 90 s.
    type: int
    default: 120
attributes:
  check_mode:
    support: full
    description: It only reads, and does not wait.
  diff_mode:
    support: none
    description: Changes nothing.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Check that nobody uses the NFS server
  gpunodes.bootstrap.nfs_unused:
"""

RETURN = r"""
changed:
  description: Always false. The task fails if a client uses the server.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import nfs_clients
from ..module_utils.entry import carry_out


def main() -> None:
    module = AnsibleModule(argument_spec={"timeout": {"type": "int", "default": 120}}, supports_check_mode=True)

    def work() -> dict[str, object]:
        if nfs_clients.is_removed():
            nfs_clients.check_unused(0 if module.check_mode else module.params["timeout"])
        return {"changed": False}

    carry_out(module, work, changes=False)


if __name__ == "__main__":
    main()
