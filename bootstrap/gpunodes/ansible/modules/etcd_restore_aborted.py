#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Give an unfinished restore of etcd up."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: etcd_restore_aborted
short_description: Give an unfinished restore of etcd up
version_added: "0.1.0"
description:
  - C(started) puts the data of etcd from before the restore back, and starts the static pods of the control plane. Does
    nothing if no restore is unfinished.
  - C(verified) waits until the control plane that was started so is ready, which needs the quorum of the old members,
    and forgets the restore.
  - Continues where an interrupted run has stopped.
options:
  state:
    description: Which step to carry out.
    type: str
    choices: [started, verified]
    default: started
  timeout:
    description: For O(state=verified), seconds that each component may take to start.
    type: int
    default: 300
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none. C(verified) checks nothing.
  diff_mode:
    support: full
    description: Says which data of etcd is started.
  platform:
    support: full
    description: Runs on a control-plane machine.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Start the old data of etcd again
  gpunodes.bootstrap.etcd_restore_aborted:
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
    - before_header: etcd
      after_header: etcd
      before: {data: of the backup}
      after: {data: before the restore}
notes:
  description: What a person must know.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import etcd_restore_abort
from ..module_utils.entry import carry_out
from ..module_utils.report import Report


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "verified"], "default": "started"},
            "timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        if module.params["state"] == "started":
            report, notes = etcd_restore_abort.start(module.check_mode)
            return {**report.result(), "notes": notes}
        if not module.check_mode:
            etcd_restore_abort.verify(module.params["timeout"])
        return {**Report().result(), "notes": []}

    carry_out(module, work)


if __name__ == "__main__":
    main()
