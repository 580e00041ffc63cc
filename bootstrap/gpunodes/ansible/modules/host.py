#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bring one concern of a machine into its wanted state, in one start of Python."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host
short_description: Bring one concern of a machine into its wanted state
version_added: "0.1.0"
description:
  - Package sources with pinned keys, packages at exact versions, whole files, the kernel, swap and services.
  - What it changes, and what was there before, is noted in a ledger on the machine; M(host_undo) takes it back.
  - An interrupted run is finished by the next one.
options:
  repositories:
    description: Package sources.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Names its files.
        type: str
        required: true
      url:
        description: Where it is.
        type: str
        required: true
      key:
        description: The armoured key, or the address of one.
        type: str
        required: true
      fingerprint:
        description: The key's fingerprint; needed where the key comes over plain HTTP.
        type: str
      suite:
        description: The suite of a Debian source; C(/) for a flat one.
        type: str
      components:
        description: The components of a Debian source.
        type: str
  packages:
    description: Packages. One that is there in a version that does not fit is an error, never an upgrade.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The package's name.
        type: str
        required: true
      version:
        description: A pattern, for example C(1.36.*); empty for any.
        type: str
      hold:
        description: Keep upgrades from touching it.
        type: bool
        default: false
  files:
    description: Whole files that are ours.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where it lies.
        type: path
        required: true
      content:
        description: What is in it.
        type: str
      mode:
        description: Its mode, in octal.
        type: str
      owner:
        description: Its owner.
        type: str
      package:
        description: The package whose version chooses one of O(files[].contents).
        type: str
      contents:
        description: Version pattern to content.
        type: dict
      validate:
        description: A command that accepts the file; C(%s) stands for its path.
        type: list
        elements: str
  directories:
    description: Folders that hold only what comes with us; M(host_undo) removes those that were not there before.
    type: list
    elements: path
    default: []
  modules:
    description: Kernel modules to load, now and at every boot; the whole list of the machine.
    type: list
    elements: str
    default: []
  sysctls:
    description: Kernel settings, now and at every boot; the whole list of the machine.
    type: dict
    default: {}
  swap_off:
    description: Turn swap off, and out of /etc/fstab.
    type: bool
    default: false
  services:
    description: Services, enabled; restarted when a file of this task changed.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The unit's name without C(.service).
        type: str
        required: true
      started:
        description: Whether it is to run.
        type: bool
        default: true
      when_exists:
        description: Start it only where this file exists.
        type: path
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: full
    description: Shows what is written.
author:
  - The gpunodes authors
"""

EXAMPLES = r"""
- name: Install containerd
  host:
    packages:
      - name: containerd
        hold: true
    files:
      - path: /etc/containerd/config.toml
        package: containerd
        contents:
          1.*: "version = 2"
          2.*: "version = 3"
    services:
      - name: containerd
"""

RETURN = r"""
actions:
  description: What was done, or in check mode would be.
  returned: always
  type: list
  elements: str
  sample: ["install containerd 1.7.24~ds1-6", "write /etc/containerd/config.toml"]
versions:
  description: The packages' versions.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import host
from ansible.module_utils.gpunodes.entry import carry_out

ARGUMENTS = {
    "repositories": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "key": {"type": "str", "required": True, "no_log": False},
            "fingerprint": {"type": "str"},
            "suite": {"type": "str"},
            "components": {"type": "str"},
        },
    },
    "packages": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "version": {"type": "str"},
            "hold": {"type": "bool", "default": False},
        },
    },
    "files": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "path": {"type": "path", "required": True},
            "content": {"type": "str"},
            "mode": {"type": "str"},
            "owner": {"type": "str"},
            "package": {"type": "str"},
            "contents": {"type": "dict"},
            "validate": {"type": "list", "elements": "str"},
        },
    },
    "directories": {"type": "list", "elements": "path", "default": []},
    "modules": {"type": "list", "elements": "str", "default": []},
    "sysctls": {"type": "dict", "default": {}},
    "swap_off": {"type": "bool", "default": False},
    "services": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "started": {"type": "bool", "default": True},
            "when_exists": {"type": "path"},
        },
    },
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)

    def work() -> dict[str, object]:
        outcome = host.Converger(host.spec_from(module.params), module.check_mode).run()
        return {
            "changed": bool(outcome.actions),
            "actions": outcome.actions,
            "diff": outcome.diffs,
            "versions": outcome.versions,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
