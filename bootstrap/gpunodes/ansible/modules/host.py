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
  - Manages package sources with pinned keys, packages at exact versions, whole files, the kernel, swap,
    services and the ports that active firewalls let in.
  - Records each change and the previous state in a ledger on the machine. M(gpunodes.bootstrap.host_undo) undoes the
    changes.
  - The next run completes an interrupted one.
options:
  wanted:
    description: The desired state. What a field leaves out is not managed.
    type: dict
    required: true
    suboptions:
      repositories:
        description: >-
          Package sources, each with C(name), C(url), C(key) (an armoured key, its URL, or the path of a keyring on the
          machine), C(fingerprint), C(suite) and C(components).
        type: list
        elements: dict
      packages:
        description: >-
          Packages, each with C(name), C(version) (a pattern), C(hold) (whether to prevent upgrades), C(same_as) (a
          package with the same upstream version), C(first) (whether to install it before versions of the others are
          chosen) and C(replace) (whether another installed version is upgraded or downgraded). Other packages are never
          upgraded or downgraded.
        type: list
        elements: dict
      files:
        description: >-
          Whole files, each with C(path), C(content), C(mode), C(owner) and C(validate) (a command that must accept the
          file; C(%s) is its path). Instead of C(content), C(contents) selects it by the version of C(package).
        type: list
        elements: dict
      directories:
        description: Folders that contain only data of the installed software. Those that are new are removed with it.
        type: list
        elements: str
      modules:
        description: Kernel modules to load now and at every boot.
        type: list
        elements: str
      sysctls:
        description: Kernel settings, now and at every boot.
        type: dict
      raised:
        description: Least values of kernel settings, now and at every boot. A higher value is kept.
        type: dict
      moved:
        description: Folders whose data belongs into C(data_directory), by the service that uses them.
        type: dict
      data_directory:
        description: >-
          Directory on another disk. A folder in it is mounted on each folder of C(moved), before its service starts.
          Empty leaves them where they are. Data is never moved.
        type: str
      swap_off:
        description: Whether to turn off swap and comment it out in C(/etc/fstab).
        type: bool
      services:
        description: >-
          Services to enable and start, and to restart after changes, each with C(name), C(started) (false only enables
          it), C(when_exists) (a file without which it is not started), C(proxied) (whether it uses the proxies) and
          C(off) (true stops and disables it, unless it was on before).
        type: list
        elements: dict
      groups:
        description: Groups that the packages create and do not delete.
        type: list
        elements: str
      users:
        description: System users, each with its own group, that the packages create and do not delete.
        type: list
        elements: str
      members:
        description: >-
          Existing users that are members of a group, by group. Users that an earlier run added, and that are not listed
          any more, are removed from it.
        type: dict
      forwards:
        description: Whether the software switches forwarding of packets on. Its state before is recorded and restored.
        type: bool
      holds:
        description: Shell patterns of installed packages to hold.
        type: list
        elements: str
      generated:
        description: >-
          Files that a program on the machine generates, each with C(path), C(command) (it writes to C(%o); C(%i) is a
          copy of C(input)), C(input), C(when_exists) and C(mode).
        type: list
        elements: dict
      checks:
        description: Commands that must succeed after packages were installed, each with C(command) and C(output).
        type: list
        elements: dict
      absent:
        description: Files to remove if an earlier run of this module created them.
        type: list
        elements: str
      module_stream:
        description: Module stream of dnf that contains the packages.
        type: str
      driver:
        description: A GPU driver, with C(modules), C(conflicting_module) and C(loaded) (false only builds its modules).
        type: dict
      devices:
        description: Whether to keep a CDI specification of the GPUs for containers.
        type: bool
      images:
        description: Images that containerd pulls in the background. C({NAME}) is the version of the package NAME.
        type: list
        elements: str
      firewall:
        description: >-
          What the active firewalls (ufw, firewalld, nftables) must let through, with C(ports) (the sources of each
          port, such as C(tcp 10250); none for everywhere), C(devices) (of pods), C(sources) (addresses of the
          cluster's machines) and C(pods) (ranges of pods).
        type: dict
      proxies:
        description: >-
          HTTP proxies of the package manager, of keys, and of services that are C(proxied): the URLs C(http) and
          C(https), and C(no_proxy), the hosts that are reached directly.
        type: dict
      section:
        description: The section of the ledger that records the changes; empty for the ledger itself.
        type: str
        choices: ["", gpu, nfs_client, nfs_server]
  proxy_credentials:
    description: >-
      USER:PASSWORD for the proxies in the desired state whose URLs contain C({credentials}), by C(http) and C(https).
    type: dict
attributes:
  check_mode:
    support: full
    description: Reports the changes that it would make, and makes none.
    details: Versions of packages are those of the request, and the initramfs is not examined.
  diff_mode:
    support: full
    description: >-
      Shows files, packages, members of groups, kernel modules and settings, mounts, swap, services and rules of
      firewalls.
  platform:
    support: full
    description: Runs on a machine of the inventory.
    platforms: linux
author:
  - The gpunodes authors (@gpunodes)
"""

EXAMPLES = r"""
- name: Install containerd
  gpunodes.bootstrap.host:
    wanted:
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
notes:
  description: What the user should know about the result.
  returned: always
  type: list
  elements: str
reboot:
  description: Why the machine must be rebooted to complete the changes; empty if no reboot is required.
  returned: always
  type: str
diff:
  description: >-
    The differences, as Ansible shows them: texts or objects before and after, with their names. A secret is replaced by
    "(secret 1)", another one by "(secret 2)".
  returned: with C(--diff), if something changes
  type: list
  elements: dict
  sample:
    - before_header: packages
      after_header: packages
      before: {}
      after: {containerd: "1.7.24~ds1-6"}
    - before_header: /etc/sysctl.d/99-gpunodes.conf
      after_header: /etc/sysctl.d/99-gpunodes.conf
      before: ""
      after: "net.ipv4.ip_forward = 1"
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.entry import carry_out
from ..module_utils.host.converge import converge
from ..module_utils.host.spec import spec_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "dict", "required": True},
            "proxy_credentials": {"type": "dict", "no_log": True},
        },
        supports_check_mode=True,
    )

    def work() -> dict[str, object]:
        changes = converge(spec_from(module.params["wanted"], module.params["proxy_credentials"]), module.check_mode)
        return {
            "changed": bool(changes.actions),
            "actions": changes.actions,
            "diff": changes.differences,
            "versions": changes.versions,
            "reboot": changes.reboot,
            "notes": changes.notes,
        }

    carry_out(module, work)


if __name__ == "__main__":
    main()
