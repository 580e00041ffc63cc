"""Commands that scan machines, clusters and BMCs without Ansible: every string of all three is an attack.

The machines are stand-ins behind a real sshd: their "Python" answers a probe with a prepared document, and an API
session with prepared nodes. The BMC is a Redfish service of this test.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import history

from tests import redfish, sshd
from tests.hostile import ATTACKS, CANARY, Machines, hostile, machine_report, machines, unprintable

pytestmark = pytest.mark.skipif(sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd, and root to run it")
CAPTURED = Path(__file__).parents[1] / "unit/fixtures/captured/hang"
BOOT = "11111111-2222-4333-8444-555555555555"
SHOWN = "lookup((dict(pipe=1)|first), (dict(gpunodes_canary=1)|first))"
"""The part of each template attack that remains without control characters."""

# Accepts any program: answers a probe, or serves a session with the API.
PYTHON = """#!{python}
import json, re, sys, time, zlib
size = int(re.search(r"read\\((\\d+)\\)", sys.argv[2])[1])
program = zlib.decompress(sys.stdin.buffer.read(size))
print("\\x1b]0;a login that greets\\x07\\n\\n{mark}", flush=True)
if b", 'session', " not in program:
    packed = zlib.compress(open("{scan}", "rb").read())
    sys.stdout.buffer.write(b"%d\\n" % len(packed) + packed)
    sys.exit()
for line in sys.stdin:
    asked = json.loads(line)
    items = json.load(open("{nodes}")) if asked["path"].startswith("/api/v1/nodes") else []
    one = asked["path"].startswith("/api/v1/nodes/")
    if "metadata" in (asked["body"] or ()):
        asked["body"]["metadata"] |= {{"uid": "1", "resourceVersion": "1"}}
    body = items[0] if one else {{"LOCK": None, "GET": {{"items": items}}}}.get(asked["method"], asked["body"])
    if "/configmaps/" in asked["path"]:
        # The states of pools that scale, and none of them is one.
        known = {{"name": "gpunodes-autoscaler-state", "uid": "1", "resourceVersion": "1"}}
        body = {{"metadata": known, "data": {{"gpu-1": "\\x1b[2Joff", "\\x1b[0m": "[]"}}}}
    answer = {{"status": 200, "body": body, "error": "", "time": time.time()}}
    print(json.dumps({{"id": asked["id"], **answer}}), flush=True)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The machine gpu-1, its control plane, and its BMC."""

    made: Machines
    orders: list[str]
    bmc: dict[str, tuple[int, Mapping[str, str], bytes]]
    """The responses of its BMC from now on, by path."""

    def scan(self, document: Any) -> None:
        """Set the probe document of gpu-1."""
        (self.made.folder / "scan").write_text(json.dumps(document))

    def nodes(self, items: list[Any]) -> None:
        """Set the nodes that the API lists."""
        (self.made.folder / "nodes").write_text(json.dumps(items))

    def gpunodes(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command; nothing of it runs an attack, steers a terminal, or gives the BMC an unrequested order."""
        program = "from gpunodes.cli import main; main()"
        inventory = [] if "--from" in words or "history" in words else ["-i", str(self.made.inventory)]
        done = subprocess.run(
            [sys.executable, "-c", program, *words, *inventory],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.made.folder,
            env={**os.environ, **self.made.environment},
        )
        assert not self.made.ran
        assert unprintable(done.stdout + done.stderr) == []
        assert CANARY not in (done.stdout + done.stderr).splitlines()
        assert "a bug in gpunodes" not in done.stderr
        assert self.orders == [] or words[2:3] in (("cycle",), ("on",))
        return done


def captured() -> dict[str, Any]:
    """The probe document of a machine with a hung driver."""
    document: dict[str, Any] = json.loads(gzip.decompress((CAPTURED / "probe.json.gz").read_bytes()))
    return document


def texts(document: dict[str, Any]) -> dict[str, Any]:
    """The report with attacks in its free text: it is still a report of a machine that hangs."""
    lines = document["log"]["text"].splitlines()
    header = "[  330.000000] NVRM: Xid (PCI:0001:10:00): 79, pid='<unknown>', name=<unknown>, "
    lines += [header + attack.replace("\n", " ") for attack in ATTACKS]
    document["log"]["text"] = "\n".join(lines)
    document["smi"] |= {"status": "failed", "rc": 9, "message": ATTACKS[1] + ATTACKS[6]}
    document["driver"]["gpus"][0]["model"] = ATTACKS[6]
    document["tasks"][0] |= {"comm": ATTACKS[1], "stack": [*document["tasks"][0]["stack"], *ATTACKS]}
    return document


def node(change: Callable[[Any], Any] = lambda thing: thing) -> dict[str, Any]:
    """The node of gpu-1 as the API describes it."""
    about = {"bootID": captured()["boot_id"], "machineID": "m", "systemUUID": "u", "kubeletVersion": "v1.36.3"}
    condition = {"type": "Ready", "status": "True", "message": ATTACKS[1]}
    return {
        "metadata": {
            "name": "gpu-1",
            "uid": "1",
            "resourceVersion": "1",
            "labels": {"gpunodes.dev/pool": change("a")},
            "annotations": {
                f"gpunodes.dev/{name}": change("x")
                for name in ("needs-repair", "maintenance", "managed", "cordoned-by", "reason")
            },
        },
        "spec": {"taints": [{"key": change("k"), "effect": change("NoSchedule")}]},
        "status": {
            "conditions": [condition],
            "addresses": [{"type": "InternalIP", "address": change("127.0.0.1")}],
            "nodeInfo": about,
            "capacity": {"nvidia.com/gpu": change("2")},
            "allocatable": {"nvidia.com/gpu": change("2")},
        },
    }


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    attacks = {"UUID": ATTACKS[1], "SerialNumber": ATTACKS[6], "macs": list(ATTACKS)}
    orders: list[str] = []
    odd: dict[str, tuple[int, Mapping[str, str], bytes]] = {"/elsewhere": (404, {}, b"")}
    bmc = redfish.fake("lies", hardware=attacks, orders=orders, odd=odd)
    made = machines(tmp_path / "lab", {"control_plane": [], "workers": [], "gpu": []}, {})
    script = made.folder / "python"
    script.write_text(
        PYTHON.format(python=sys.executable, mark=MARK, scan=made.folder / "scan", nodes=made.folder / "nodes")
    )
    script.chmod(0o755)
    port, other = sshd.free_ports(2)
    (tmp_path / "sshd").mkdir()
    with sshd.serving(tmp_path / "sshd", [{("127.0.0.1", port): "", ("127.0.0.1", other): ""}]) as servers:
        login = {
            "ansible_host": "127.0.0.1",
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(servers.login),
            "ansible_python_interpreter": str(script),
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": f"http://127.0.0.1:{bmc.server_port}",
            "gpunodes_bmc_user": "root",
            "gpunodes_bmc_password": "pw",
        }
        groups = {
            "control_plane": {"hosts": {"control-1": {"ansible_port": other}}},
            "gpu": {"hosts": {"gpu-1": {"ansible_port": port}}},
            "workers": {"hosts": {"gpu-1": {}}},
            "all": {"vars": login},
        }
        made.inventory.write_text(json.dumps(groups))
        found = Fleet(made, orders, odd)
        found.scan(texts(captured()))
        found.nodes([node()])
        yield found
    bmc.shutdown()
    bmc.server_close()


@pytest.mark.parametrize("command", ["health gpu-1", "health gpu-1 --json"])
def test_a_scan_of_a_stand_in_machine_whose_text_is_hostile(fleet: Fleet, command: str) -> None:
    """It is judged by its faults, and its text is shown unchanged."""
    done = fleet.gpunodes(*command.split())
    assert done.returncode == 3
    assert SHOWN in done.stdout


UNLIKE = "may not be the same machine: the node reports another boot id"
# With the exit code and output for a machine and a node of which every string is an attack.
SCANS = {
    "health": (3, "gpu-1: sick, reboot"),
    "health --json": (3, '"rule": "gpus-missing"'),
    "health --reboot-hung --dry-run": (3, UNLIKE),
    "repair gpu-1 --dry-run": (3, UNLIKE),
    "maintenance list": (0, "in maintenance"),
}
# With the exit code and output for a node and a BMC whose text is an attack.
ACTIONS = {
    "maintenance on gpu-1 --reason disk": (0, SHOWN),
    "maintenance off gpu-1": (0, "maintenance ended"),
    "uncordon gpu-1": (0, "gpu-1: cleared"),
    "power gpu-1 status": (0, "not verified to be its own"),
    "power gpu-1 off --yes": (0, "cannot be verified as the BMC"),
    "power gpu-1 cycle --yes": (1, "cannot be verified as the BMC"),
    "power gpu-1 on": (1, "cannot be verified as the BMC"),
}
WALKED = (*SCANS, *ACTIONS, "history")


@pytest.mark.parametrize("command", SCANS)
def test_a_scan_of_stand_ins_whose_every_string_is_hostile(fleet: Fleet, command: str) -> None:
    """The numbers of its report are judged, but nothing is done: the machine's boot is no boot of its node."""
    attacks = iter(ATTACKS * 100)
    fleet.scan({**hostile(captured()), "schema": "gpunodes.probe/1"})
    fleet.nodes([node(lambda _: next(attacks)), {**hostile(node()), "metadata": {"name": ATTACKS[1]}}])
    done = fleet.gpunodes(*command.split())
    code, message = SCANS[command]
    assert (done.returncode, message in done.stdout) == (code, True), done


def test_a_list_of_stand_in_nodes_with_something_else_is_refused(fleet: Fleet) -> None:
    fleet.nodes([node(), ATTACKS[0]])
    done = fleet.gpunodes("repair", "gpu-1", "--dry-run")
    assert done.returncode == 1
    assert "of the control plane to GET /api/v1/nodes is not valid" in done.stderr


@pytest.mark.parametrize("command", ACTIONS)
def test_an_action_on_a_stand_in_whose_text_is_hostile(fleet: Fleet, command: str) -> None:
    fleet.gpunodes("health", "gpu-1")
    fleet.nodes([node(lambda _: SHOWN)])
    done = fleet.gpunodes(*command.split())
    code, message = ACTIONS[command]
    assert (done.returncode, message in done.stdout + done.stderr) == (code, True), done


def test_a_history_of_hostile_text(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", fleet.made.environment["XDG_STATE_HOME"])
    for words in (*ATTACKS, "\udcff"):
        history.append(
            history.HistoryEntry(1.0, "gpu-1", history.EntryKind.STEP, words, words, words, evidence=(words,))
        )
    assert SHOWN in fleet.gpunodes("history", "gpu-1").stdout
    assert len(json.loads(fleet.gpunodes("history", "--json").stdout)["entries"]) == len(ATTACKS) + 1


def test_a_plan_of_a_repair_with_a_stand_in_node_whose_text_is_hostile(fleet: Fleet) -> None:
    done = fleet.gpunodes("health", "gpu-1", "--reboot-hung", "--dry-run", "--json")
    assert json.loads(done.stdout).get("machines", [{}])[0].get("name") == "gpu-1", done


def test_a_stand_in_bmc_whose_every_string_is_hostile(fleet: Fleet) -> None:
    """Its report is shown but identifies nothing; the command reports that the machine was named."""
    fleet.gpunodes("health", "gpu-1")
    status = fleet.gpunodes("power", "gpu-1", "status")
    assert (status.returncode, SHOWN in status.stdout) == (0, True)
    assert "cannot be verified as the BMC" in fleet.gpunodes("power", "gpu-1", "off", "--yes").stderr


def test_a_stand_in_bmc_whose_state_names_and_errors_are_hostile(fleet: Fleet) -> None:
    system = redfish.DOCUMENTS[redfish.SYSTEM]
    error = {"error": {"code": ATTACKS[0], "message": "".join(ATTACKS)}}
    answers = (
        (200, {**hostile(system), "PowerState": ATTACKS[6]}),
        (200, {**system, "PowerState": "Off", "Name": ATTACKS[6], "Id": ATTACKS[4]}),
        (500, error),
    )
    for (status, document), code in zip(answers, (0, 0, 1), strict=True):
        fleet.bmc[redfish.SYSTEM] = (status, {"X-Words": "gpunodes_canary"}, json.dumps(document).encode())
        done = fleet.gpunodes("power", "gpu-1", "status")
        assert (done.returncode, len(done.stderr.splitlines()) <= 2) == (code, True), done


def test_a_plan_from_a_file_whose_text_is_hostile(fleet: Fleet, tmp_path: Path) -> None:
    saved = tmp_path / "facts.json"
    made = machine_report("gpu-1", 1, swap=list(ATTACKS), product_uuid=ATTACKS[1])
    made["os"]["name"] = SHOWN
    saved.write_text(json.dumps({"gpu-1": made}))
    assert fleet.gpunodes("gpu", "plan", "--from", str(saved)).returncode == 0
    saved.write_text(json.dumps({"gpu-1": hostile(made)}))
    done = fleet.gpunodes("gpu", "plan", "--from", str(saved))
    assert "its answer is invalid" in done.stdout + done.stderr


def test_a_saved_report_whose_text_is_hostile(fleet: Fleet, tmp_path: Path) -> None:
    saved = tmp_path / "gpu-1.json"
    saved.write_text(json.dumps(texts(captured())))
    log = tmp_path / "kernel.log"
    log.write_text(texts(captured())["log"]["text"])
    for path in (saved, log):
        assert fleet.gpunodes("health", "--from", str(path)).returncode == 3
        fleet.gpunodes("health", "--from", str(path), "--json")
