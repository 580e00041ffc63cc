#!/usr/bin/python
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bring packages, files, kernel settings and services of a machine into their desired state."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host
short_description: Bring a machine into its desired state
version_added: "0.1.0"
description:
  - Manages package sources with pinned keys, packages at exact versions, whole files, the kernel, swap and services.
  - Records each change and the previous state in a ledger on the machine. M(host_undo) undoes the changes.
  - The next run completes an interrupted one.
options:
  repositories:
    description: Package sources.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name, used in the names of its files.
        type: str
        required: true
      url:
        description: Address.
        type: str
        required: true
      key:
        description: Armoured key, its address, or the path of a keyring on the machine.
        type: str
        required: true
      fingerprint:
        description: Fingerprint of the key. Required if the key comes over plain HTTP.
        type: str
      suite:
        description: Suite of a Debian source; C(/) for a flat one.
        type: str
      components:
        description: Components of a Debian source.
        type: str
  packages:
    description: Packages. An installed package with another version is an error; it is never upgraded.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the package.
        type: str
        required: true
      version:
        description: Version pattern, for example C(1.36.*); empty for any.
        type: str
      hold:
        description: Whether to hold the package, so that it is not upgraded.
        type: bool
        default: false
      same_as:
        description: Another package; both must have the same upstream version.
        type: str
      first:
        description: Whether to install it before versions of the others are chosen, because it determines them.
        type: bool
        default: false
  files:
    description: Files that gpunodes writes completely.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Path of the file.
        type: path
        required: true
      content:
        description: Content of the file.
        type: str
      mode:
        description: Mode of the file, in octal.
        type: str
      owner:
        description: Owner of the file.
        type: str
      package:
        description: Package whose version selects one of O(files[].contents).
        type: str
      contents:
        description: Contents by version pattern.
        type: dict
      validate:
        description: Command that must accept the file; C(%s) is replaced by its path.
        type: list
        elements: str
  directories:
    description: Folders that contain only data of the installed software. M(host_undo) removes those that are new.
    type: list
    elements: path
    default: []
  modules:
    description: Kernel modules to load now and at every boot. The list replaces the previous one.
    type: list
    elements: str
    default: []
  sysctls:
    description: Kernel settings to set now and at every boot. They replace the previous ones.
    type: dict
    default: {}
  swap_off:
    description: Whether to turn off swap and comment it out in /etc/fstab.
    type: bool
    default: false
  images:
    description: >-
      Images that containerd pulls in the background after a change. C({NAME}) is replaced by the version of the package
      NAME.
    type: list
    elements: str
    default: []
  services:
    description: Services to enable and start. They are restarted if this task changed a file.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the unit without C(.service).
        type: str
        required: true
      started:
        description: Whether it must run.
        type: bool
        default: true
      when_exists:
        description: Start it only if this file exists.
        type: path
  groups:
    description: Groups that the packages create and do not delete. M(host_undo) deletes those that are new.
    type: list
    elements: str
    default: []
  users:
    description: >-
      System users, each with its own group, that the packages create and do not delete. M(host_undo) deletes those that
      are new.
    type: list
    elements: str
    default: []
  holds:
    description: Shell patterns of installed packages to hold, so that they are not upgraded.
    type: list
    elements: str
    default: []
  generated:
    description: Files that a program on the machine generates.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Path of the file.
        type: path
        required: true
      command:
        description: Command that writes C(%o), a copy of the existing file. C(%i) is a copy of O(generated[].input).
        type: list
        elements: str
        required: true
      input:
        description: File that the command reads.
        type: path
      when_exists:
        description: Generate the file only if this one exists.
        type: path
      mode:
        description: Mode of the file, in octal.
        type: str
  checks:
    description: Commands that must succeed after packages were installed.
    type: list
    elements: dict
    default: []
    suboptions:
      command:
        description: The command.
        type: list
        elements: str
        required: true
      output:
        description: Text that its output must contain.
        type: str
  absent:
    description: Files to remove if an earlier run of gpunodes created them.
    type: list
    elements: path
    default: []
  module_stream:
    description: Module stream of dnf that contains the packages, such as C(nvidia-driver:580-open).
    type: str
  driver:
    description: >-
      GPU driver to load, without a reboot if possible. A loaded driver is never replaced while it is in use.
    type: dict
    suboptions:
      modules:
        description: Kernel modules of the driver, in the order of loading.
        type: list
        elements: str
        required: true
      conflicting_module:
        description: Kernel module that conflicts with the driver. It is unloaded and removed from the initramfs.
        type: str
  devices:
    description: Whether to keep a CDI specification of the GPUs, and links that make their devices known to systemd.
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
    description: Reports the changes that it would make, and makes none.
  diff_mode:
    support: full
    description: Shows the changes.
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
  description: The changes made, or in check mode the changes that it would make.
  returned: always
  type: list
  elements: str
  sample: ["install containerd 1.7.24~ds1-6", "write /etc/containerd/config.toml"]
versions:
  description: Versions of the packages.
  returned: always
  type: dict
reboot:
  description: Why the machine must be rebooted to complete the changes; empty if no reboot is required.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpunodes import ledger
from ansible.module_utils.gpunodes.entry import carry_out
from ansible.module_utils.gpunodes.host.converge import converge
from ansible.module_utils.gpunodes.host.spec import spec_from

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
    "checks": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "command": {"type": "list", "elements": "str", "required": True},
            "output": {"type": "str"},
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
        changes = converge(spec_from(module.params), module.check_mode)
        return {
            "changed": bool(changes.actions),
            "actions": changes.actions,
            "diff": changes.diffs,
            "versions": changes.versions,
            "reboot": changes.reboot,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
