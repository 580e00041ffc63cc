"""What the tests of repair share: machines with stand-in GPUs that are made ill, and what must be true at the end.

Each test asserts the end: of the cluster (cordons, taints, locks), of the machine (its boot, what runs there), and of
what the command said.
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

from .conftest import NAME, Kind, Operator

GPU = ("gpu-1",)
SEEN_S = 240.0
"""Seconds in which a fault must be seen."""
BOOT_S = 600.0
"""Seconds in which a machine that was switched on must be well again."""
LEASES = (
    "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases?labelSelector=app.kubernetes.io%2Fmanaged-by%3Dgpunodes"
)
PATIENT = {
    # The loop guard and the limit of the sick stay out of the way of all but their own tests.
    "gpunodes_repair_guard_repairs": 100,
    "gpunodes_repair_unhealthy_percent": 60,
    # Emulated machines take minutes where others take seconds; what is only waited for is short.
    "gpunodes_repair_verify_timeout": 900,
    "gpunodes_repair_drain_timeout": 120,
    "gpunodes_repair_drain_timeout_hung": 20,
    "gpunodes_repair_rescan_pause": 2,
    "gpunodes_repair_cold_pause": 3,
}
ALONE = {**PATIENT, "gpunodes_repair_unhealthy_percent": 100}
"""The same where one GPU machine is all of its pool."""
DRIVER = ("--driver", "580")
LAB = Kind("debian13", workers=0, gpu_workers=1, cluster=DRIVER, settings=ALONE)
"""What most repairs need: one GPU machine. test_pool.py has two."""
# The kernel looks for hung tasks every 5 s and calls them so after 20.
HUNG_TASKS = "sysctl -qw kernel.hung_task_timeout_secs=20 kernel.hung_task_check_interval_secs=5"
REPORT = "Workqueue: events os_execute_work_item [nvidia]"
SESSION = "gpunodes_sessio[n]"
"""Finds the program on the control plane that carries our requests, and not who looks for it."""


def variables(operator: Operator, machine: str) -> Path:
    return operator.folder / "inventory" / "host_vars" / f"{machine}.yml"


def write(operator: Operator, machine: str, values: dict[str, Any]) -> None:
    path = variables(operator, machine)
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(values))


@contextlib.contextmanager
def given(operator: Operator, machine: str, **values: Any) -> Iterator[None]:
    """Further variables of a machine in the inventory while inside."""
    path = variables(operator, machine)
    before = path.read_text() if path.exists() else None
    write(operator, machine, {**yaml.safe_load(before or "{}"), **values})
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_text(before)


@contextlib.contextmanager
def bmc(operator: Operator, manner: str, machine: str = "gpu-1") -> Iterator[None]:
    """A machine's BMC ``refuses``, ``lies`` (it says on, whatever is), or is ``down`` while inside."""
    server = None if manner == "down" else redfish.fake(manner, state="On")
    # The port of the discard service: nobody listens.
    address = f"http://127.0.0.1:{server.server_port if server else 9}"
    try:
        with given(operator, machine, gpunodes_bmc_address=address, gpunodes_bmc_user="", gpunodes_bmc_password=""):
            yield
    finally:
        if server:
            server.shutdown()


def boot(operator: Operator, machine: str) -> str:
    return operator.ssh(machine, "cat /proc/sys/kernel/random/boot_id").strip()


def node(operator: Operator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(operator.kubectl("get", "node", name, "-o", "json"))
    return found


def apply(operator: Operator, manifest: str) -> None:
    operator.ssh("control-1", f"cat >/run/sick.yml <<'END'\n{manifest}\nEND")
    operator.kubectl("apply", "-f", "/run/sick.yml")


def fault(operator: Operator, machine: str, *words: str) -> None:
    done = operator.lab("fault", machine, *words)
    assert done.returncode == 0, done.stderr


def verdict(operator: Operator, machine: str) -> dict[str, Any]:
    found: dict[str, Any] = operator.document("health", machine, code=None)["machines"][0]
    return found


def wait_for(operator: Operator, machine: str, actions: Sequence[str]) -> dict[str, Any]:
    """Wait until the verdict asks for one of ``actions``."""
    deadline = time.monotonic() + SEEN_S
    while (found := verdict(operator, machine))["action"] not in actions:
        assert time.monotonic() < deadline, found
        time.sleep(2)
    return found


def hang(operator: Operator, machine: str = "gpu-1") -> None:
    """The seed's hang, up to the kernel's report of it."""
    operator.ssh(machine, HUNG_TASKS)
    fault(operator, machine, "hang")
    reported = f"until dmesg | grep -qF {shlex.quote(REPORT)}; do sleep 1; done"
    operator.ssh(machine, f"timeout 200 sh -c {shlex.quote(reported)}")


def entry(document: dict[str, Any], machine: str = "gpu-1") -> dict[str, Any]:
    """What a command's document says of a machine."""
    found: dict[str, Any] = next(each for each in document["machines"] if each["name"] == machine)
    return found


def repaired(document: dict[str, Any], machine: str = "gpu-1") -> dict[str, Any]:
    found = entry(document, machine)
    assert found["outcome"] == "repaired", found
    return found


def history(operator: Operator, machine: str = "gpu-1") -> list[dict[str, Any]]:
    """What is remembered of the machine's last repair."""
    entries: list[dict[str, Any]] = operator.document("history", machine)["entries"]
    return [each for each in entries if each["repair"] == entries[-1]["repair"]]


def needs_repair(operator: Operator, machine: str = "gpu-1") -> None:
    """The node stays cordoned, tainted and labelled, with the reason; an Event tells of it."""
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
    message = operator.kubectl("get", "events", "--field-selector", selector, "-o", "jsonpath={.items[*].reason}")
    return set(message.split())


def wait_until_well(operator: Operator, machines: Sequence[str] = GPU) -> None:
    """Wait until machines that somebody switched on, or mended, are well, and so are their nodes."""
    deadline = time.monotonic() + BOOT_S
    while not all(serves(operator, each) and verdict(operator, each)["state"] == "healthy" for each in machines):
        assert time.monotonic() < deadline
        time.sleep(5)


def serves(operator: Operator, machine: str) -> bool:
    """Whether a node is ready in the boot that the machine is in, with all its GPUs."""
    status = node(operator, machine)["status"]
    ready = next(each["status"] for each in status["conditions"] if each["type"] == "Ready")
    # It may be on its way down or up.
    running = operator.lab("ssh", machine, "cat /proc/sys/kernel/random/boot_id").stdout.strip()
    return bool(
        ready == "True"
        and status["nodeInfo"]["bootID"] == running
        and status["allocatable"].get("nvidia.com/gpu") == "2"
    )


def leases(operator: Operator) -> list[str]:
    """The names of our locks in the cluster."""
    return [each["metadata"]["name"] for each in json.loads(operator.kubectl("get", "--raw", LEASES))["items"]]


def sessions(operator: Operator) -> int:
    """How many of our programs carry requests on the control plane."""
    return int(operator.ssh("control-1", f"pgrep -fc '{SESSION}'", code=None))


def clean(operator: Operator, machines: Sequence[str] = GPU, theirs: Sequence[str] = ()) -> None:
    """Nothing of ours is left, on nodes, in locks, on machines; all of it is well. ``theirs`` others have cordoned."""
    assert leases(operator) == []
    operator.ssh(
        "control-1", f"n=9; while [ $n -gt 0 ] && pgrep -f '{SESSION}' >/dev/null; do sleep 1; n=$((n-1)); done"
    )
    assert sessions(operator) == 0
    for machine in machines:
        found = node(operator, machine)
        assert bool(found["spec"].get("unschedulable")) == (machine in theirs)
        assert "gpunodes.dev" not in json.dumps(found["spec"].get("taints", []))
        kept = {*found["metadata"]["annotations"], *found["metadata"]["labels"]}
        assert not [name for name in kept if "cordoned-by" in name or "repair-reason" in name or "needs-rep" in name]
        assert serves(operator, machine)
        assert operator.ssh(machine, "pgrep -fc '^@gpunodes'", code=None).strip() == "0"
        found = verdict(operator, machine)
        assert found["state"] == "healthy", found


def console(machine: str) -> str:
    """All that a machine's kernel has said on its console."""
    return Layout(NAME, cache_dir()).console_log(machine).read_text(errors="replace")


def no_password_lies_about(operator: Operator) -> None:
    """No BMC's password stands in what was printed, or in a file of the operator's."""
    hosts = yaml.safe_load((operator.folder / "inventory" / "hosts.yml").read_text())["all"]["children"]
    machines = [values for group in hosts.values() for values in group["hosts"].values()]
    passwords = {values["gpunodes_bmc_password"] for values in machines if values}
    assert len(passwords) > len(GPU)
    texts = ["\n".join(operator.message)]
    texts += [
        path.read_text(errors="replace")
        for path in Path(operator.environment["XDG_STATE_HOME"]).rglob("*")
        if path.is_file()
    ]
    assert len(texts) > 1
    assert not [password for password in passwords for text in texts if password in text]
