"""Shared by the tests of repair: faults of machines with stand-in GPUs, and the assertions after a repair.

Each test asserts the final state of the cluster (cordons, taints, locks) and of the machine (its boot, its processes),
and the command's output.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from gpunodes.lab.layout import Layout, cache_dir

from tests import redfish

from .conftest import NAME, LabSpec, Operator

GPU = ("gpu-1",)
SEEN_S = 240.0
"""Seconds until a fault must be detected."""
BOOT_S = 600.0
"""Seconds until a machine must be healthy after it was switched on."""
LEASES = (
    "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases?labelSelector=app.kubernetes.io%2Fmanaged-by%3Dgpunodes"
)
TEST_SETTINGS = {
    # Only their own tests reach the loop guard and the limit of unhealthy machines.
    "gpunodes_repair_guard_repairs": 100,
    "gpunodes_repair_unhealthy_percent": 60,
    # Emulated machines take minutes where others take seconds; pauses are short.
    "gpunodes_repair_verify_timeout": 900,
    "gpunodes_repair_drain_timeout": 120,
    "gpunodes_repair_drain_timeout_hung": 20,
    "gpunodes_repair_rescan_pause": 2,
    "gpunodes_repair_cold_pause": 3,
}
SINGLE_MACHINE_SETTINGS = {**TEST_SETTINGS, "gpunodes_repair_unhealthy_percent": 100}
"""Settings for a pool of one GPU machine."""
DRIVER = ("--driver", "580")
LAB = LabSpec("debian13", workers=0, gpu_workers=1, cluster=DRIVER, settings=SINGLE_MACHINE_SETTINGS)
"""The lab of most repairs: one GPU machine."""
POOL = LabSpec("debian13", workers=0, gpu_workers=2, cluster=DRIVER, settings=TEST_SETTINGS)
"""The lab of repairs in a pool of two GPU machines."""
# The kernel checks for hung tasks every 5 s and reports them after 20 s.
HUNG_TASKS = "sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5"
REPORT = "Workqueue: events os_execute_work_item [nvidia]"
SESSION = "gpunodes-sessio[n]"
"""Matches the session program of gpunodes on the control plane, and not the command with this pattern."""


def variables(operator: Operator, machine: str) -> Path:
    return operator.folder / "inventory" / "host_vars" / f"{machine}.yml"


def write(operator: Operator, machine: str, values: dict[str, Any]) -> None:
    path = variables(operator, machine)
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(values))


@contextlib.contextmanager
def with_variables(operator: Operator, machine: str, **values: Any) -> Iterator[None]:
    """Further variables of a machine in the inventory, within the context."""
    path = variables(operator, machine)
    before = path.read_text() if path.exists() else None
    write(operator, machine, {**yaml.safe_load(before or "{}"), **values})
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_text(before)


@contextlib.contextmanager
def bmc(operator: Operator, manner: str, machine: str = "gpu-1") -> Iterator[None]:
    """A machine's BMC ``refuses``, ``lies`` (always reports "on"), or is ``down``, within the context."""
    server = None if manner == "down" else redfish.fake(manner, state="On")
    # The port of the discard service: no program listens there.
    address = f"http://127.0.0.1:{server.server_port if server else 9}"
    try:
        with with_variables(
            operator, machine, gpunodes_bmc_address=address, gpunodes_bmc_user="", gpunodes_bmc_password=""
        ):
            yield
    finally:
        if server:
            server.shutdown()


def boot(operator: Operator, machine: str) -> str:
    return operator.ssh(machine, "cat /proc/sys/kernel/random/boot_id").strip()


def reboot(operator: Operator, machine: str, limit_s: float = BOOT_S) -> None:
    """Reboot a machine, and wait for its SSH server."""
    before = boot(operator, machine)
    # Not operator.ssh: the machine is unreachable while it reboots.
    operator.lab("ssh", machine, "sudo systemctl reboot")
    deadline = time.monotonic() + limit_s
    while operator.lab("ssh", machine, "cat /proc/sys/kernel/random/boot_id").stdout.strip() in ("", before):
        assert time.monotonic() < deadline, console(machine)[-3000:]
        time.sleep(5)


def node(operator: Operator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(operator.kubectl("get", "node", name, "-o", "json"))
    return found


def apply(operator: Operator, manifest: str) -> None:
    operator.ssh("control-1", f"cat >/run/unhealthy.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/unhealthy.yml")


def fault(operator: Operator, machine: str, *arguments: str) -> None:
    done = operator.lab("fault", machine, *arguments)
    assert done.returncode == 0, done.stderr


def verdict(operator: Operator, machine: str) -> dict[str, Any]:
    found: dict[str, Any] = operator.document("health", machine, code=None)["machines"][0]
    return found


def wait_for(operator: Operator, machine: str, actions: Sequence[str]) -> dict[str, Any]:
    """Wait until the verdict has one of ``actions``."""
    deadline = time.monotonic() + SEEN_S
    while (found := verdict(operator, machine))["action"] not in actions:
        assert time.monotonic() < deadline, found
        time.sleep(2)
    return found


def hang(operator: Operator, machine: str = "gpu-1") -> None:
    """Cause the hang of the driver, and wait for the kernel's report of it."""
    operator.ssh(machine, HUNG_TASKS)
    fault(operator, machine, "hang")
    reported = f"until dmesg | grep -qF {shlex.quote(REPORT)}; do sleep 1; done"
    operator.ssh(machine, f"timeout 200 sh -c {shlex.quote(reported)}")


def entry(document: dict[str, Any], machine: str = "gpu-1") -> dict[str, Any]:
    """The entry of a machine in a command's document."""
    found: dict[str, Any] = next(each for each in document["machines"] if each["name"] == machine)
    return found


def repaired(document: dict[str, Any], machine: str = "gpu-1") -> dict[str, Any]:
    found = entry(document, machine)
    assert found["outcome"] == "repaired", found
    return found


def history(operator: Operator, machine: str = "gpu-1") -> list[dict[str, Any]]:
    """The history entries of the machine's last repair."""
    entries: list[dict[str, Any]] = operator.document("history", machine)["entries"]
    return [each for each in entries if each["repair"] == entries[-1]["repair"]]


def assert_needs_repair(operator: Operator, machine: str = "gpu-1") -> None:
    """Assert that the node is still cordoned, tainted and labelled, with the reason, and has an Event."""
    found = node(operator, machine)
    assert found["spec"]["unschedulable"]
    assert ("gpunodes.dev/needs-repair", "NoSchedule") in [
        (taint["key"], taint["effect"]) for taint in found["spec"]["taints"]
    ]
    assert found["metadata"]["labels"]["gpunodes.dev/needs-repair"]
    assert found["metadata"]["annotations"]["gpunodes.dev/needs-repair"]
    assert "NeedsRepair" in events(operator, machine)


def events(operator: Operator, machine: str = "gpu-1") -> set[str]:
    """The reasons of a node's Events."""
    selector = f"involvedObject.kind=Node,involvedObject.name={machine}"
    reasons = operator.kubectl("get", "events", "--field-selector", selector, "-o", "jsonpath={.items[*].reason}")
    return set(reasons.split())


def wait_until_healthy(operator: Operator, machines: Sequence[str] = GPU) -> None:
    """Wait until the machines and their nodes are healthy."""
    deadline = time.monotonic() + BOOT_S
    while not all(serves_gpus(operator, each) and verdict(operator, each)["state"] == "healthy" for each in machines):
        assert time.monotonic() < deadline
        time.sleep(5)


def serves_gpus(operator: Operator, machine: str) -> bool:
    """Whether the node is Ready with all its GPUs, in the machine's current boot."""
    status = node(operator, machine)["status"]
    ready = next(each["status"] for each in status["conditions"] if each["type"] == "Ready")
    # Not operator.ssh: the machine may be unreachable while it reboots.
    running = operator.lab("ssh", machine, "cat /proc/sys/kernel/random/boot_id").stdout.strip()
    return bool(
        ready == "True"
        and status["nodeInfo"]["bootID"] == running
        and status["allocatable"].get("nvidia.com/gpu") == "2"
    )


def leases(operator: Operator) -> list[str]:
    """The names of gpunodes' leases in the cluster."""
    return [each["metadata"]["name"] for each in json.loads(operator.kubectl("get", "--raw", LEASES))["items"]]


def sessions(operator: Operator) -> int:
    """The number of gpunodes' session programs on the control plane."""
    return int(operator.ssh("control-1", f"pgrep -fc '{SESSION}'", code=None))


def assert_clean(operator: Operator, machines: Sequence[str] = GPU, cordoned_by_others: Sequence[str] = ()) -> None:
    """Assert that gpunodes left nothing on nodes and machines, and no lease, and that all machines are healthy."""
    assert leases(operator) == []
    operator.ssh(
        "control-1", f"n=9; while [ $n -gt 0 ] && pgrep -f '{SESSION}' >/dev/null; do sleep 1; n=$((n-1)); done"
    )
    assert sessions(operator) == 0
    for machine in machines:
        found = node(operator, machine)
        assert bool(found["spec"].get("unschedulable")) == (machine in cordoned_by_others)
        assert "gpunodes.dev" not in json.dumps(found["spec"].get("taints", []))
        kept = {*found["metadata"]["annotations"], *found["metadata"]["labels"]}
        assert not [name for name in kept if "cordoned-by" in name or "repair-reason" in name or "needs-rep" in name]
        assert serves_gpus(operator, machine)
        assert operator.ssh(machine, "pgrep -fc '^@gpunodes'", code=None).strip() == "0"
        found = verdict(operator, machine)
        assert found["state"] == "healthy", found


def console(machine: str) -> str:
    """The complete output of a machine's console."""
    return Layout(NAME, cache_dir()).console_log(machine).read_text(errors="replace")


def assert_no_password_leaks(operator: Operator) -> None:
    """Assert that no BMC's password is in an output or in a file of the operator."""
    hosts = yaml.safe_load((operator.folder / "inventory" / "hosts.yml").read_text())["all"]["children"]
    machines = [values for group in hosts.values() for values in group["hosts"].values()]
    passwords = {values["gpunodes_bmc_password"] for values in machines if values}
    assert len(passwords) > len(GPU)
    texts = ["\n".join(operator.output)]
    texts += [
        path.read_text(errors="replace")
        for path in Path(operator.environment["XDG_STATE_HOME"]).rglob("*")
        if path.is_file()
    ]
    assert len(texts) > 1
    assert not [password for password in passwords for text in texts if password in text]
