#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Upload the certificates that control planes share, for one join, or delete them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: join_certificates
short_description: Share a control plane's certificates with one that joins
version_added: "0.1.0"
description:
  - C(present) uploads the certificates as the Secret kubeadm-certs, encrypted with a new key, and returns the key. It
    also returns the files of the API server that gpunodes wrote, such as the key that encrypts Secrets in etcd.
  - C(absent) deletes the uploaded certificates and the bootstrap token that owns them.
  - The result contains secrets. Use C(no_log).
options:
  state:
    description: Whether to upload or to delete the certificates.
    type: str
    choices: [present, absent]
    default: present
  run:
    description: Holder of the Leases of the run that joins; empty for none. Another run's certificates are kept.
    type: str
    default: ""
  timeout:
    description: Seconds that kubeadm may take.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows that certificates are uploaded, or the Secrets that are deleted. Their contents are never shown.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Upload the certificates
  gpunodes.bootstrap.join_certificates:
  register: shared
  no_log: true

- name: Delete the uploaded certificates
  gpunodes.bootstrap.join_certificates:
    state: absent
"""

RETURN = r"""
key:
  description: The key of the certificates, in hexadecimal; empty in check mode.
  returned: O(state=present)
  type: str
files:
  description: Texts of the API server's files that gpunodes wrote, by path.
  returned: O(state=present)
  type: dict
required:
  description: Paths of other files that the API server is started with.
  returned: O(state=present)
  type: list
  elements: str
deleted:
  description: Number of deleted Secrets, or in check mode of those that it would delete.
  returned: O(state=absent)
  type: int
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: certificates for joins
      after_header: certificates for joins
      before: {kubeadm-certs: present}
      after: {}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.kubeadm import certificates
from ..module_utils.kubeadm.certificates import Shared
from ..module_utils.report import Difference


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "run": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        run, title = module.params["run"], "certificates for joins"
        if module.params["state"] == "present":
            shared = Shared("", {}, ()) if module.check_mode else certificates.share(run, module.params["timeout"])
            difference = Difference(title, {}, {"kubeadm-certs": "present"})
            return {
                "changed": True,
                "key": shared.key,
                "files": dict(shared.files),
                "required": list(shared.required),
                "diff": [difference],
            }
        deleted = certificates.withdraw(run, module.check_mode)
        difference = Difference(title, dict.fromkeys(deleted, "present"), {})
        return {"changed": bool(deleted), "deleted": len(deleted), "diff": [difference]}

    carry_out(module, work)


if __name__ == "__main__":
    main()
