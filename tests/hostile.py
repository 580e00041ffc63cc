"""Simulated machines that report an attack in every string.

Ansible uses its connection `local`; a machine's "Python" is a script that accepts any module from Ansible and prints a
prepared result. So a machine can report anything, as one with a compromised root account can. A successful attack runs
the program :data:`CANARY`.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANARY = "gpunodes_canary"
"""A program on PATH that creates a file; its name needs no quotes in a template."""

_QUOTED = "{{ lookup('ansible.builtin.pipe', 'gpunodes_canary') }}"
_BARE = "{{ lookup((dict(pipe=1)|first), (dict(gpunodes_canary=1)|first)) }}"
_BLOCK = "{% set x = lookup('pipe', 'gpunodes_canary') %}"
_HEADER = (
    "#jinja2: variable_start_string:'[%', variable_end_string:'%]'\n[% lookup('pipe', 'gpunodes_canary') %] " + _BARE
)
_EXPRESSION = "lookup('pipe', 'gpunodes_canary')"
_SHELL = "$(gpunodes_canary)`gpunodes_canary`;gpunodes_canary|gpunodes_canary\ngpunodes_canary\n"
_YAML = f'!unsafe "{_BARE}"\n--- !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6162\n'
_TERMINAL = f"\x1b[8m\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202e{_BARE}"
ATTACKS = (_QUOTED + _BARE + _BLOCK, _BARE, _HEADER, _EXPRESSION, _SHELL, _YAML, _TERMINAL)


def hostile(document: Any, attacks: Iterator[str] | None = None) -> Any:
    """``document`` with every string replaced by an attack, all attacks in turn; keys stay."""
    attacks = attacks or itertools.cycle(ATTACKS)
    if isinstance(document, str):
        return next(attacks)
    if isinstance(document, Mapping):
        return {name: hostile(value, attacks) for name, value in document.items()}
    if isinstance(document, Sequence):
        return [hostile(value, attacks) for value in document]
    return document


def unprintable(output: str) -> list[str]:
    """The control characters in an output, which a terminal would interpret."""
    return [character for character in output if not character.isprintable() and character != "\n"]


def is_plain(output: str) -> bool:
    """Whether an output has no control characters, and no line that an attack wrote."""
    return unprintable(output) == [] and CANARY not in output.splitlines()


PIN = "sha256:" + "a" * 64
"""CA hash of the cluster in ``cluster_report``."""


def machine_report(name: str, number: int, **changes: Any) -> dict[str, Any]:
    """The report of host_facts on a healthy machine with a GPU outside of a cluster."""
    function = {"address": "0000:3b:00.0", "vendor": "10de", "device": "1eb8", "subsystem": "10de:12a2"}
    return {
        "os": {"id": "debian", "version": "13", "codename": "trixie", "name": "Debian GNU/Linux 13 (trixie)"},
        "arch": "x86_64",
        "kernel": "6.12.48+deb13-cloud-amd64",
        "python": "3.13.5",
        "cpus": 4,
        "memory_mib": 8000,
        "disks": [
            {"path": path, "device": 1, "mount": "/", "free_mib": 90000}
            for path in ("/usr", "/var/lib", "/var/cache", "/boot", "/tmp")
        ],
        "data_directory": {"path": "", "problem": None},
        "clock": {"began": time.time(), "synchronised": True, "services": ["chrony"], "own": ""},
        "cgroup": 2,
        "swap": ["/dev/sda2"],
        "hostname": name,
        "machine_id": f"{number}" * 32,
        "product_uuid": f"{number}" * 8 + "-0000-0000-0000-000000000000",
        "boot_id": f"{number}" * 8 + "-1111-0000-0000-000000000000",
        "time": time.time(),
        "default_address": f"10.0.0.{number}",
        "network": {
            "devices": [{"name": "eth0", "addresses": [f"10.0.0.{number}/24"], "udp_port": None}],
            "routes": [{"to": "10.0.0.0/24", "device": "eth0", "gateway": ""}],
            "docker_bridge": "",
        },
        "sockets": [
            {
                "protocol": "tcp",
                "address": "::",
                "port": 31000,
                "pid": 700,
                "program": "x",
                "unit": "x.service",
                "interface": None,
            }
        ],
        "firewalls": [{"name": "ufw", "open": ["22/tcp"], "writable": True, "chains": []}],
        "modules": {"overlay": "available", "br_netfilter": "available"},
        "package_manager": "apt",
        "packages": dict.fromkeys(("kubelet", "kubeadm", "kubectl", "containerd", "containerd.io")),
        "kubernetes": {"role": None, "ca_hash": None, "server": None},
        "ledger": True,
        "sources": [{"name": "kubernetes", "url": "https://mirror", "ok": True, "error": None}],
        "gpu": {
            "functions": [{**function, "class": "030200", "driver": None}],
            "nvswitches": 0,
            "nouveau": "absent",
            "secure_boot": False,
            "mok": {"key": None, "enrolled": False},
            "headers": {"running": True, "package": None},
            "driver": {"module": None, "loaded": False, "origin": None, "packages": {}, "flavour": None},
            "cuda": {},
            "toolkit": {},
            "runtimes": {"containerd": "1.7.24~ds1-6"},
            "clients": None,
        },
        **changes,
    }


def cluster_report(nodes: Mapping[str, int]) -> dict[str, Any]:
    """The report of cluster_info on a cluster with these nodes (name: number); the first is the control plane."""
    return {
        "version": "v1.36.3",
        "endpoint": "10.0.0.1:6443",
        "ca_hash": PIN,
        "nodes": [_node_report(name, number, first=name == next(iter(nodes))) for name, number in nodes.items()],
    }


def _node_report(name: str, number: int, *, first: bool) -> dict[str, Any]:
    machine = machine_report(name, number)
    return {
        "name": name,
        "role": "control_plane" if first else "worker",
        "uid": f"{number}" * 8 + "-2222-0000-0000-000000000000",
        "address": machine["default_address"],
        "addresses": [machine["default_address"], name],
        "version": "v1.36.3",
        "runtime": "containerd",
        "ready": True,
        "reason": "",
        "maintenance": "",
        "schedulable": True,
        **{key: machine[key] for key in ("machine_id", "product_uuid", "boot_id")},
        "verified": False,
        "gpus": 0,
        "gpus_verified": False,
        "managed": {
            "labels": {"gpunodes.dev/pool": "a", "gpunodes.dev/firewall": "ufw"},
            "taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}],
        },
    }


@dataclass(frozen=True, slots=True)
class Machines:
    """Hostile machines and their inventory; all files are in ``folder``."""

    folder: Path

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.yml"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a command: the canary is on PATH, runs are kept in the folder."""
        return {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "HOME": str(self.folder / "home"),
        }

    @property
    def ran(self) -> bool:
        """Whether any attack ran."""
        return (self.folder / "ran").exists()

    @property
    def asked(self) -> list[str]:
        """The modules that were sent, in order: ``machine/module``."""
        log = self.folder / "asked"
        return log.read_text(encoding="utf-8").split() if log.exists() else []

    def given(self, machine: str, module: str) -> dict[str, Any]:
        """The arguments with which ``module`` ran last on ``machine``, Ansible's own left out."""
        text = (self.folder / f"given-{machine}-{module}").read_text(encoding="utf-8")
        arguments = json.loads(ast.literal_eval(text.strip()))["ANSIBLE_MODULE_ARGS"]
        return {name: value for name, value in arguments.items() if not name.startswith("_ansible")}

    def answer(self, machine: str, module: str, answer: Mapping[str, Any]) -> None:
        """Set the result of ``module`` on ``machine``."""
        path = self.folder / "answers" / machine / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answer), encoding="utf-8")

    def vary(self, machine: str, **variables: Any) -> None:
        """Set variables of one machine in the inventory: one run then has machines of several kinds."""
        inventory = json.loads(self.inventory.read_text(encoding="utf-8"))
        for group in inventory.values():
            if machine in group.get("hosts", ()):
                group["hosts"][machine] |= variables
        self.inventory.write_text(json.dumps(inventory), encoding="utf-8")


def machines(folder: Path, groups: Mapping[str, Sequence[str]], variables: Mapping[str, Any]) -> Machines:
    """Machines in the groups of an inventory, with these variables for all of them. Results default to ``{}``."""
    made = Machines(folder)
    programs = folder / "bin"
    for path in (programs, folder / "home"):
        path.mkdir(parents=True)
    _script(programs / CANARY, f"touch {shlex.quote(str(folder / 'ran'))}")
    inventory: dict[str, Any] = {}
    for group, names in groups.items():
        hosts = {}
        for name in names:
            python = folder / f"python-{name}"
            answers = shlex.quote(str(folder / "answers" / name))
            _script(
                python,
                f"given={shlex.quote(str(folder / 'given'))}-{name}\n"
                "module=$(tr -d '\\000' | sed -n -e \"s/^ansible_module='\\(.*\\)',$/\\1/p\" "
                '-e "s/^params=\\(.*\\),$/\\1/w $given.new")\n'
                "module=${module##*.}\n"
                'mv "$given.new" "$given-$module"\n'
                f'echo "{name}/$module" >>{shlex.quote(str(folder / "asked"))}\n'
                f'cat {answers}/"$module" 2>/dev/null || echo "{{}}"',
            )
            hosts[name] = {"ansible_python_interpreter": str(python)}
        inventory[group] = {"hosts": hosts}
    local = {"ansible_connection": "local", "ansible_become": False, "ansible_pipelining": True}
    inventory["all"] = {"vars": {**local, **variables}}
    made.inventory.write_text(json.dumps(inventory), encoding="utf-8")
    return made


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
