"""A cluster that others made, on a real API server with RBAC: everything by a kubeconfig, without SSH.

Its user is the account of examples/existing-cluster/role.yml, which has no other rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.cli import repair
from gpunodes.engine import control_planes, history
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.cluster.errors import OtherCluster, Refused
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.scans import MachineScan
from gpunodes.inventory import Inventory
from gpunodes.model import Kubeconfig, Machine, Role
from gpunodes.operations import claims, maintenance, power
from gpunodes.operations.repair import commands, tools
from gpunodes.repair import policy
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.request import RepairRequest

from . import apiserver, kwok
from .apiserver import ApiServer
from .operator_process import Fleet

pytest.importorskip("kubernetes", reason="the extra gpunodes[kubeconfig] is not installed")

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "examples/existing-cluster/role.yml"
NAMES = ("n0", "n1", "n2", "s0")
MERGE = "application/merge-patch+json"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
KINDS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Three workers, and a control plane that the inventory has as a worker, as on RKE2 or k0s."""
    with apiserver.running(tmp_path_factory.mktemp("cluster"), {"authorization-mode": "Node,RBAC"}) as made:
        for each in yaml.safe_load_all(ROLE.read_text()):
            made.call("POST", KINDS[each["kind"]].format(namespace=each["metadata"].get("namespace", "")), each)
        for name in NAMES:
            labels = {"test/pool": "p"} | ({"node-role.kubernetes.io/control-plane": "true"} if name == "s0" else {})
            made.call("POST", "/api/v1/nodes", kwok.node(name, labels))
            ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": "x"}]}
            ready["nodeInfo"] = {"bootID": f"{name}-boot-1"}  # type: ignore[assignment]  # as the API has it
            made.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": ready}, MERGE)
        yield made


@pytest.fixture(scope="module")
def kubeconfig(server: ApiServer) -> Path:
    """That of the account, with two contexts; the current one leads nowhere."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    path = "/api/v1/namespaces/gpunodes/serviceaccounts/gpunodes/token"
    token = server.call("POST", path, request)["status"]["token"]
    document = yaml.safe_load(server.kubeconfig.read_text())
    document["users"] = [{"name": "gpunodes", "user": {"token": token}}]
    document["contexts"] = [
        {"name": "lab", "context": {"cluster": "test", "user": "gpunodes"}},
        {"name": "gone", "context": {"cluster": "none", "user": "gpunodes"}},
    ]
    document["current-context"] = "gone"
    made = server.folder / "account.conf"
    made.write_text(yaml.safe_dump(document))
    made.chmod(0o600)
    return made


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@contextlib.contextmanager
def opened(kubeconfig: Path) -> Iterator[Cluster]:
    with contextlib.closing(Session(ByKubeconfig(kubeconfig, "lab"))) as session:
        yield Cluster(session, "test/pool", patience_s=0.0)


class DirectFleet(Fleet):
    """The machines of operator_process.py, with the API of the account."""

    def __init__(self, server: ApiServer, kubeconfig: Path, machines: Path) -> None:
        super().__init__(server.kubeconfig, machines)
        self.account = kubeconfig

    def session(self) -> Session:
        return Session(ByKubeconfig(self.account, "lab"))


@pytest.fixture
def fleet(server: ApiServer, kubeconfig: Path, tmp_path: Path) -> Iterator[DirectFleet]:
    """n1 and s0 are unhealthy."""
    folder = tmp_path / "machines"
    folder.mkdir()
    for name in NAMES:
        boot = server.call("GET", f"/api/v1/nodes/{name}")["status"]["nodeInfo"]["bootID"]
        state = {"sick": name in ("n1", "s0"), "boot": int(boot.rpartition("-")[2]), "deaf": [], "done": [], "back": 0}
        (folder / f"{name}.json").write_text(json.dumps(state))
    made = DirectFleet(server, kubeconfig, folder)
    yield made
    made.close()


def inventory(folder: Path, kubeconfig: Path, context: str = "lab") -> Path:
    path = folder / "hosts.yml"
    given = {"gpunodes_api_kubeconfig": str(kubeconfig), "gpunodes_api_context": context}
    host = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    path.write_text(yaml.safe_dump({"workers": {"hosts": dict.fromkeys(NAMES, host), "vars": given}}))
    return path


def test_a_repair_from_the_lock_to_the_verification(
    server: ApiServer, fleet: DirectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod is evicted; the machine whose node is a control plane is refused."""
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "job", "uid": "u", "controller": True}
    pod = {
        "metadata": {"name": "job", "namespace": "default", "ownerReferences": [owner]},
        "spec": {"nodeName": "n1", "containers": [{"name": "x", "image": "x"}], "terminationGracePeriodSeconds": 0},
    }
    server.call("POST", "/api/v1/namespaces/default/pods", pod)
    monkeypatch.setattr(EscalationStep, "limit", lambda self, hung: 3.0)
    made = tools.TimeLimits
    monkeypatch.setattr(tools, "TimeLimits", lambda **given: made(**{**given, "poll": 0.2}))
    limits = policy.RepairLimits(max_unavailable=policy.budget("1"), unhealthy_percent=100)
    request = RepairRequest("health", limits, force_drain=True)
    said: list[str] = []
    result = commands.run(fleet, fleet.all_machines(), request, lambda name, text: said.append(f"{name}: {text}"))
    found = {each.machine: each for each in result.machines}
    assert found["n1"].outcome is RepairOutcome.REPAIRED, (found["n1"], said)
    assert found["s0"].outcome is None
    assert "its node is a control plane" in found["s0"].why
    node = server.call("GET", "/api/v1/nodes/n1")
    assert not node["spec"].get("unschedulable")
    assert "gpunodes.dev/repairs" in node["metadata"]["annotations"]
    assert node["status"]["nodeInfo"]["bootID"] == "n1-boot-2"
    assert server.call("GET", "/api/v1/namespaces/default/pods")["items"] == []
    left = [each["metadata"]["name"] for each in server.call("GET", LEASES)["items"]]
    assert not [each for each in left if each.startswith("gpunodes-")]
    assert server.call("GET", "/api/v1/namespaces/default/events")["items"]
    assert not server.call("GET", "/api/v1/nodes/s0")["spec"].get("unschedulable")


def test_it_excludes_commands_that_come_over_a_control_plane(server: ApiServer, kubeconfig: Path) -> None:
    """Both ways: the Leases are the same."""
    over_ssh = Session(connection.here(sys.executable, server.kubeconfig))
    with opened(kubeconfig) as cluster, contextlib.closing(over_ssh):
        mine, theirs = Leases(cluster, "repair"), Leases(Cluster(over_ssh), "upgrade")
        with mine.holding(["n0"]), pytest.raises(Held, match="repair"):
            theirs.take("n0")
        with theirs.holding(["n0"]), pytest.raises(Held, match="upgrade"):
            mine.take("n0")
        with theirs.holding(["n2"]):
            assert mine.take("n0") == ""
            mine.confirm("n0")
            assert abs(mine.now() - theirs.now()) < 3
            mine.release("n0")
        mine.close()


def test_maintenance_and_the_mark_of_a_repair(server: ApiServer, fleet: DirectFleet) -> None:
    chosen = [each for each in fleet.all_machines() if each.name == "n2"]
    (kept,) = maintenance.begin(fleet, chosen, "new cable", None)
    assert kept.cordoned
    assert [each.node for each in maintenance.listed(fleet)] == ["n2"]
    maintenance.end(fleet, chosen)
    with opened(fleet.account) as cluster:
        cluster.give_up("n2", "r1", "its GPU is gone")
    assert server.call("GET", "/api/v1/nodes/n2")["spec"]["unschedulable"]
    assert power.clear(fleet, chosen[0], without_cluster=False).schedulable
    assert not server.call("GET", "/api/v1/nodes/n2")["spec"].get("unschedulable")


def test_an_address_is_repaired_without_an_inventory(
    server: ApiServer,
    fleet: DirectFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder without one. The machine is n2 by its boot, and its records are kept under the kubeconfig."""
    machine, folder = fleet.machine_control(Machine("n2", "n2", Role.WORKER)), tmp_path / "empty"
    machine.use("reboot")
    file = tmp_path / "machines/n2.json"
    file.write_text(json.dumps({**machine.read(), "sick": True, "done": [], "back": 0}))
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(EscalationStep, "limit", lambda self, hung: 3.0)
    made = tools.TimeLimits
    monkeypatch.setattr(tools, "TimeLimits", lambda **given: made(**{**given, "poll": 0.2, "settle": 0.0}))

    def scan(_: InventoryFleet, machines: Sequence[Machine], *, full: bool = True) -> dict[str, MachineScan]:
        seen = fleet.scan([Machine("n2", "n2", Role.WORKER)], full=full)["n2"]
        return {each.name: replace(seen, verdict=replace(seen.verdict, name=each.name)) for each in machines}

    monkeypatch.setattr(InventoryFleet, "scan", scan)
    monkeypatch.setattr(InventoryFleet, "machine_control", lambda *_, **__: machine)
    words = ["10.9.0.5", "--user", "admin", "--kubeconfig", str(fleet.account), "--context", "lab", "--yes", "--json"]
    code = repair.command.main(words, standalone_mode=False)
    shown = capsys.readouterr()
    (found,) = json.loads(shown.out)["machines"]
    assert (code, found["name"], found["outcome"]) == (0, "10.9.0.5", "repaired"), shown.err
    assert machine.read()["done"] == ["reboot"]
    node = server.call("GET", "/api/v1/nodes/n2")
    assert not node["spec"].get("unschedulable")
    assert "gpunodes.dev/repairs" in node["metadata"]["annotations"]
    assert [
        each["metadata"]["name"] for each in server.call("GET", LEASES)["items"] if "n2" in each["metadata"]["name"]
    ] == []
    assert {each.machine for each in history.read(cluster=f"addresses {fleet.account} lab")} == {"10.9.0.5"}
    assert list(folder.iterdir()) == []


def test_the_account_may_do_nothing_else(kubeconfig: Path) -> None:
    with opened(kubeconfig) as cluster:
        for path in ("/api/v1/secrets", "/api/v1/namespaces/kube-system/secrets", "/api/v1/namespaces/default"):
            with pytest.raises(Refused) as caught:
                cluster.call_once("GET", path)
            assert caught.value.status == 403


def test_the_inventory_names_it_and_another_cluster_is_refused(
    server: ApiServer, kubeconfig: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = Inventory(inventory(tmp_path, kubeconfig))
    assert found.kubeconfig == Kubeconfig(kubeconfig, "lab")
    with contextlib.closing(control_planes.session(found)) as session:
        assert {node.name for node in Cluster(session).nodes()} == set(NAMES)
    # The power of a machine is switched under its Lease, too.
    machines = found.select(["n0"])
    with claims.claimed(found, machines, "power off") as claim:
        assert claim.lost() is None
        assert claim.findings == []
        names = [each["metadata"]["name"] for each in server.call("GET", LEASES)["items"]]
        assert [each for each in names if each.startswith("gpunodes-")] == ["gpunodes-machine-n0"]
    with apiserver.running(tmp_path_factory.mktemp("other")) as other:
        for name in NAMES:
            other.call("POST", "/api/v1/nodes", kwok.node(name, {}))
        moved = Inventory(inventory(tmp_path, other.kubeconfig, "test"))
        with contextlib.closing(control_planes.session(moved)) as session, pytest.raises(OtherCluster, match="before"):
            Cluster(session).nodes()


def test_the_command_line(kubeconfig: Path, tmp_path: Path) -> None:
    """Nothing listens on the machines' SSH port: the list of nodes in maintenance comes from the API alone."""
    path = inventory(tmp_path, tmp_path / "none")
    words = [sys.executable, "-c", "from gpunodes.cli import main; main()", "maintenance", "list", "--json"]
    done = subprocess.run(
        [*words, "-i", str(path), "--kubeconfig", str(kubeconfig), "--context", "lab"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    listed: Any = json.loads(done.stdout)
    assert listed["schema"].startswith("gpunodes.maintenance/")
    done = subprocess.run(
        [*words, "-i", str(path)],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 2
    assert f"the kubeconfig {tmp_path / 'none'} cannot be read" in done.stderr
