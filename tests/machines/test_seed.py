"""A machine without a user gets one by cloud-init, from a NoCloud seed that gpunodes made, and passes preflight."""

from __future__ import annotations

import json
import subprocess
import time

import yaml

from .conftest import LabSpec, Operator

LAB = LabSpec("debian13", workers=1)
USER = "deployer"
HOSTNAME = "seeded-1"
LIMIT_S = 900.0
"""An emulated machine needs minutes for cloud-init."""


def make_seed(operator: Operator) -> None:
    key = operator.folder / "seed-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "it's $(reboot)", "-f", str(key)], check=True)
    operator.gpunodes(
        "provision", "seed", "--user", USER, "--key", f"{key}.pub", "--hostname", HOSTNAME, "--output", "seed"
    )


def inventory(operator: Operator) -> str:
    """The lab's settings, with the seeded machine by its user and key."""
    source = operator.folder / "inventory"
    hosts = yaml.safe_load((source / "hosts.yml").read_text())
    workers = hosts["all"]["children"]["workers"]["hosts"]
    workers["worker-1"] |= {
        "ansible_user": USER,
        "ansible_ssh_private_key_file": str(operator.folder / "seed-key"),
    }
    target = operator.folder / "seeded"
    (target / "group_vars").mkdir(parents=True)
    (target / "hosts.yml").write_text(yaml.safe_dump(hosts))
    (target / "group_vars" / "all.yml").write_text((source / "group_vars" / "all.yml").read_text())
    return "seeded/hosts.yml"


def address(operator: Operator) -> str:
    machines = json.loads(operator.lab("status", "--json").stdout)["machines"]
    return str(next(each["address"] for each in machines if each["name"] == "worker-1"))


def test_a_seeded_machine_passes_preflight(operator: Operator) -> None:
    make_seed(operator)
    assert operator.lab("power", "worker-1", "off").returncode == 0
    # The first time this builds an image with cloud-init.
    done = operator.lab("seed", "worker-1", "seed", limit_s=3600)
    assert done.returncode == 0, done.stderr
    path = inventory(operator)
    deadline = time.monotonic() + LIMIT_S
    while True:
        # The SSH server may respond before cloud-init has made the user's sudo rule.
        done = operator.gpunodes("preflight", "worker-1", "-i", path, code=None)
        if done.returncode == 0 or time.monotonic() > deadline:
            break
        time.sleep(10)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_that_user_only_and_accepts_no_password(operator: Operator) -> None:
    key, host = operator.folder / "seed-key", address(operator)
    settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes")
    options = [word for setting in (*settings, "BatchMode=yes") for word in ("-o", setting)]

    def ssh(user: str, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", "none", *more, *options, "-i", str(key), f"{user}@{host}", command]
        return subprocess.run(
            argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=LIMIT_S
        )

    waited = ssh(USER, "cloud-init status --wait >/dev/null; hostname; sudo -n id -u; cat /proc/swaps | wc -l")
    assert waited.stdout.split() == [HOSTNAME, "0", "1"], waited.stderr
    users = ssh(USER, "awk -F: '$3 >= 1000 && $3 < 60000 {print $1}' /etc/passwd").stdout.split()
    assert users == [USER]
    assert ssh("admin", "true").returncode
    assert ssh("root", "true").returncode
    methods = ssh(USER, "true", "-o", "PubkeyAuthentication=no")
    assert methods.returncode
    assert "password" not in methods.stderr
    assert ssh(USER, f"sudo -n passwd --status {USER}").stdout.split()[1] == "L"
