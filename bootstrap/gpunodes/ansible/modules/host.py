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
        description: The armoured key, the address of one, or the path of a keyring that the machine has.
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
      same_as:
        description: A package whose upstream version it must have exactly.
        type: str
      first:
        description: Install it before the others are chosen, because it decides which versions they have.
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
  images:
    description: >-
      Images that containerd fetches in the background when anything had to be changed. C({NAME}) stands for the version
      of one of the packages.
    type: list
    elements: str
    default: []
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
  groups:
    description: Groups of users that come with the packages, and would stay when they go.
    type: list
    elements: str
    default: []
  users:
    description: Users of the system that come with the packages, and would stay when they go, each with its own group.
    type: list
    elements: str
    default: []
  holds:
    description: Shell patterns of installed packages that upgrades must not touch.
    type: list
    elements: str
    default: []
  generated:
    description: Files that a program of the machine writes.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where it lies.
        type: path
        required: true
      command:
        description: Writes it to C(%o), where a copy of what is there lies first. C(%i) is a copy of the input.
        type: list
        elements: str
        required: true
      input:
        description: What the command reads.
        type: path
      when_exists:
        description: Generate it only where this file exists.
        type: path
      mode:
        description: Its mode, in octal.
        type: str
  proofs:
    description: Commands that must end well after packages were installed.
    type: list
    elements: dict
    default: []
    suboptions:
      command:
        description: The command.
        type: list
        elements: str
        required: true
      says:
        description: What it must say.
        type: str
  absent:
    description: Files that an earlier run has made and nobody wants any more.
    type: list
    elements: path
    default: []
  module_stream:
    description: dnf's stream of a module that the packages come from, such as C(nvidia-driver:580-open).
    type: str
  driver:
    description: >-
      A GPU driver that is loaded without a reboot where that is possible, and never replaced under its users.
    type: dict
    suboptions:
      modules:
        description: Its kernel modules, in the order in which they are loaded.
        type: list
        elements: str
        required: true
      conflicting_module:
        description: The kernel's own module that must make way, in the initramfs too.
        type: str
  devices:
    description: Keep a CDI specification of the GPUs, and links by which systemd knows them.
    type: bool
    default: false
  section:
    description: The section of the ledger that records the changes; M(host_undo) can undo a section separately.
    type: str
    choices: ["", gpu]
    default: ""
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
reboot:
  description: Why the machine must be rebooted before all is in use; empty when it need not be.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import host, ledger
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
            "same_as": {"type": "str"},
            "first": {"type": "bool", "default": False},
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
    "images": {"type": "list", "elements": "str", "default": []},
    "groups": {"type": "list", "elements": "str", "default": []},
    "users": {"type": "list", "elements": "str", "default": []},
    "holds": {"type": "list", "elements": "str", "default": []},
    "generated": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "path": {"type": "path", "required": True},
            "command": {"type": "list", "elements": "str", "required": True},
            "input": {"type": "path"},
            "when_exists": {"type": "path"},
            "mode": {"type": "str"},
        },
    },
    "proofs": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "command": {"type": "list", "elements": "str", "required": True},
            "says": {"type": "str"},
        },
    },
    "absent": {"type": "list", "elements": "path", "default": []},
    "module_stream": {"type": "str"},
    "driver": {
        "type": "dict",
        "options": {
            "modules": {"type": "list", "elements": "str", "required": True},
            "conflicting_module": {"type": "str"},
        },
    },
    "devices": {"type": "bool", "default": False},
    "section": {"type": "str", "choices": ["", *ledger.SECTIONS], "default": ""},
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
            "reboot": outcome.reboot,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
