"""Parts of these tests: `make test` runs one part in turn after the quick tests, a nightly workflow runs all parts.

A part is test files of this folder, or scenarios of molecule/. `python -m tests.machines.parts [PART]` prints their
paths, and on standard error which part it is and why. Standard library only: it runs before the virtual environment
exists.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
NONE = "none"
"""The name that runs no part."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that run together; ``minutes`` is their duration on two processors without KVM.

    Measured for commands, leave, life, power, repair and up. Measured as one part before they were split: docker and
    gpu-alone (61), gpu and gpu-pods (62), pool and pool-guard (40), adopt and adopt-upgrade (53, under load), burn-in
    and shares (43). Else estimated.
    """

    minutes: int
    files: Sequence[str] = ()
    """Test files of this folder."""
    scenarios: Sequence[str] = ()
    """Scenarios of molecule/, on one set of machines."""

    @property
    def paths(self) -> list[str]:
        """Its files and scenarios, relative to the checkout."""
        return [f"tests/machines/{name}" for name in self.files] + [f"molecule/{name}" for name in self.scenarios]


# In the order of the turns: repairs, removals and resets alternate with the other parts; those that never ran are
# together. CI ends after 90 minutes: a part has 40 of them, the other tests 25, and a slow machine the rest.
PARTS: Mapping[str, Part] = {
    "repair": Part(37, ("test_repair.py",)),
    "commands": Part(29, ("test_repair_commands.py",)),
    "power": Part(37, ("test_repair_power.py",)),
    "life": Part(34, ("test_life.py",)),
    "gpu": Part(37, ("test_gpu.py",)),
    "gpu-alone": Part(36, ("test_gpu_alone.py",)),
    "health": Part(26, ("test_health.py",)),
    "cluster": Part(35, ("test_cluster.py",)),
    "docker": Part(26, ("test_docker.py",)),
    "adopt": Part(32, ("test_adopt.py",)),
    "networks": Part(32, ("test_networks.py",)),
    "roles": Part(33, scenarios=("docker", "cuda", "gpu_pods")),
    "adopt-upgrade": Part(38, ("test_adopt_upgrade.py",)),
    "prepared": Part(14, scenarios=("default",)),
    "images": Part(38, ("test_prepare.py", "test_seed.py")),
    "own-network": Part(25, ("test_own_network.py",)),
    "gpu-pods": Part(36, ("test_gpu_pods.py",)),
    "burn-in": Part(33, ("test_gpu_machines.py",)),
    "shares": Part(27, ("test_gpu_shares.py",)),
    "walkthroughs": Part(39, ("test_walkthroughs.py",)),
    "addons": Part(31, ("test_addons.py",)),
    "network-policy": Part(32, ("test_network_policy.py",)),
    "load-balancer": Part(26, ("test_load_balancer.py",)),
    "training": Part(38, ("test_training.py",)),
    "training-curve": Part(39, ("test_training_curve.py",)),
    "serving": Part(36, ("test_serving.py",)),
    "backup": Part(28, ("test_backup.py",)),
    "certificates": Part(34, ("test_certificates.py",)),
    "driver-upgrade": Part(39, ("test_driver_upgrade.py",)),
    "os-patches": Part(22, ("test_os_patches.py",)),
    "upgrade": Part(39, ("test_upgrade.py",)),
    "runtime": Part(24, ("test_runtime.py",)),
    "control-planes": Part(32, ("test_control_planes.py",)),
    "control-plane-settings": Part(34, ("test_control_plane_settings.py",)),
    "endpoint": Part(37, ("test_endpoint.py",)),
    "scaling": Part(37, ("test_scaling.py",)),
    "scaling-failed-boot": Part(36, ("test_scaling_failed_boot.py",)),
    "storage": Part(37, ("test_storage.py",)),
    "storage-users": Part(35, ("test_storage_users.py",)),
    "storage-worker": Part(28, ("test_storage_worker.py",)),
    "systems": Part(35, ("test_systems.py",)),
    "data-disk": Part(33, ("test_data_disk.py",)),
    "scaling-reboot": Part(38, ("test_scaling_reboot.py",)),
    "walkthrough-guide": Part(35, ("test_walkthrough_guide.py",)),
    "up": Part(21, ("test_up.py",)),
    "leave": Part(37, ("test_leave.py",)),
    "pool-guard": Part(31, ("test_pool_guard.py",)),
    "pool": Part(30, ("test_pool.py",)),
}
WITHOUT_HISTORY = "up"
"""The part of a checkout without git."""
SLOW: Mapping[str, Part] = {
    "three-control-planes": Part(95, ("test_three_control_planes.py",)),
    "control-plane-loss": Part(110, ("test_control_plane_loss.py",)),
    "three-upgraded": Part(100, ("test_three_upgraded.py",)),
    "upgrade-command": Part(75, ("test_upgrade_command.py",)),
    "driver-rollout": Part(90, ("test_driver_rollout.py",)),
    "os-upgrade": Part(60, ("test_os_upgrade.py",)),
    "gpu-host-joins": Part(50, ("test_gpu_host_joins.py",)),
    "monitoring": Part(45, ("test_monitoring.py",)),
    "dra": Part(60, ("test_dra.py",)),
    "torch": Part(90, ("test_torch.py",)),
    "scaling-power": Part(44, ("test_scaling_power.py",)),
}
"""Parts that never have their turn: they take longer than one, or need KVM or more than two processors. The nightly
workflow runs them."""


def in_turn(number: int) -> str:
    """The part in turn: the next one with each commit on the main line."""
    return list(PARTS)[number % len(PARTS)]


def by_commit(checkout: Path) -> tuple[str, str]:
    """The part in turn at the checked out commit, and why."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "true":
            commit = git("rev-parse", "HEAD")
            return in_turn(int(commit, 16)), f"by the hash of commit {commit[:9]}: its history is missing"
        number = int(git("rev-list", "--count", "--first-parent", "HEAD"))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return WITHOUT_HISTORY, "since this is not a git checkout"
    return in_turn(number), f"in turn: {number} commits are on the main line"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the paths of a part in one line; with --list all parts as a JSON list."""
    parser = argparse.ArgumentParser(prog="parts", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=[*PARTS, *SLOW, NONE], metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the names of all parts as a JSON list")
    options = parser.parse_args(argv)
    if options.list:
        print(json.dumps([*PARTS, *SLOW]))
        return 0
    name, why = (options.part, "as requested") if options.part else by_commit(CHECKOUT)
    if name == NONE:
        print("tests/machines: no part", file=sys.stderr)
        return 0
    every = {**PARTS, **SLOW}
    part, number = every[name], list(every).index(name) + 1
    print(
        f"tests/machines: part {name!r}, {number} of {len(every)}, about {part.minutes} min, {why}; "
        f"make test PART={'|'.join(every)}|{NONE} runs another",
        file=sys.stderr,
    )
    print(*part.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
