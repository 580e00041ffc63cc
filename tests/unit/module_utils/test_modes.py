"""Check mode and diff mode of every module, run as Ansible runs them, on a machine and a cluster of the test.

A module that declares a mode needs a case here: its name is a key of CHANGING, READING or VERIFYING.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import json
import os
import pwd
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from gpunodes.ansible.module_utils import (
    burn_in,
    burn_in_taint,
    certificate,
    certificates,
    containers,
    docker_images,
    etcd,
    etcd_restore,
    etcd_snapshot,
    etcd_upload,
    facts,
    firewall,
    gpu_cluster,
    gpu_mig,
    gpu_verify,
    image_loaded,
    kube_api,
    kubeconfig,
    ledger,
    lock,
    mig,
    nccl_test,
    packages,
    pools,
    prepared,
    static_pod_files,
    undo,
    upgrade_facts,
)
from gpunodes.ansible.module_utils.certificates import Certificate
from gpunodes.ansible.module_utils.cluster import (
    addons,
    kubelet_settings,
    nodes,
    optional,
    readiness,
    removal,
    removed_nodes,
    storage,
    upgraded,
)
from gpunodes.ansible.module_utils.driver_upgrade import upgrade as driver_upgrade
from gpunodes.ansible.module_utils.etcd import Member
from gpunodes.ansible.module_utils.firewalls import firewalld, nftables, ufw
from gpunodes.ansible.module_utils.host import gpu_driver, images, installation, services, swap, users
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import spec_from
from gpunodes.ansible.module_utils.kubeadm import (
    api_certificate,
    command,
    compared,
    drift,
    init,
    node_endpoint,
    renewal,
    reset,
    settings,
    static_pods,
    versions,
)
from gpunodes.ansible.module_utils.kubeadm import certificates as shared_certificates
from gpunodes.ansible.module_utils.kubeadm.compared import Compared
from gpunodes.ansible.module_utils.os_upgrade import locks, reboot
from gpunodes.ansible.module_utils.os_upgrade import upgrade as os_upgrade
from gpunodes.ansible.module_utils.probe import document
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.ansible.module_utils.report import Difference, shown
from gpunodes.ansible.module_utils.runtime_upgrade import store as runtime_store
from gpunodes.ansible.module_utils.runtime_upgrade import upgrade as runtime_upgrade

from tests.unit.module_utils.test_converge import Packages
from tests.unit.module_utils.test_documentation import MODULES, documents
from tests.unit.test_gpu_mig import Board

HIDDEN = "hunter2hunter2"
TOKEN = "abcdef.0123456789abcdef"
ENCODED = base64.b64encode(HIDDEN.encode()).decode()
SECRETS = (HIDDEN, ENCODED, TOKEN, TOKEN.partition(".")[2])
NODE = {
    "metadata": {"name": "worker-1", "uid": "u", "resourceVersion": "1", "labels": {"team": "a"}},
    "spec": {},
    "status": {
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"kubeletVersion": "v1.36.3", "machineID": "m", "systemUUID": "U", "bootID": "b"},
    },
}
POD = {
    "metadata": {"namespace": "default", "name": "web"},
    "spec": {"nodeName": "worker-1", "containers": []},
    "status": {},
}


class Cluster:
    """A cluster that keeps objects by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {"/api/v1/nodes/worker-1": copy.deepcopy(NODE)}
        self.pods = [POD]

    def find(self, path: str) -> Any:
        return copy.deepcopy(self.objects.get(path))

    def get(self, path: str, **_: str) -> Any:
        if path == "/api/v1":
            kinds = {"ConfigMap": "configmaps", "Secret": "secrets"}
            return {"resources": [{"kind": kind, "name": name, "namespaced": True} for kind, name in kinds.items()]}
        if path.endswith("/cluster-info"):
            # The controller manager signs it with each token.
            names = [name.rpartition("bootstrap-token-")[2] for name in self.objects if "bootstrap-token-" in name]
            return {"data": {f"jws-kubeconfig-{name}": "" for name in names}}
        if path == "/api/v1/pods":
            return {"items": self.pods}
        return {"items": [each for name, each in self.objects.items() if name.startswith(f"{path}/")]}

    def call(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, _: str = ""
    ) -> Any:
        if method == "DELETE":
            return self.objects.pop(path)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        after = merged(self.objects.get(path) or {}, body)
        if not (query or {}).get("dryRun"):
            self.objects[path] = after
        return copy.deepcopy(after)

    def delete(self, path: str) -> bool:
        return self.objects.pop(path, None) is not None


def merged(before: Any, patch: Any) -> Any:
    """A merge patch, applied (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return patch
    after = dict(before) if isinstance(before, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = merged(after.get(key), value)
    return after


@dataclass
class Machine:
    """The machine on which a module runs; everything that modules change there, or by which they change it."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    cluster: Cluster = field(default_factory=Cluster)
    packages: Packages = field(default_factory=Packages)
    services: dict[str, dict[str, bool]] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)

    def state(self) -> Any:
        files = {
            str(path.relative_to(self.root)): (path.stat().st_mode, path.read_text() if path.is_file() else None)
            for path in self.root.rglob("*")
        }
        return copy.deepcopy((files, self.cluster.objects, self.packages, self.services, self.images, self.commands))

    def run(self, argv: list[str], *_: Any, **__: Any) -> CommandResult:
        """A program: systemctl changes the service, any other is only recorded."""
        verb = argv[1] if argv[0] == "systemctl" else ""
        for name in argv[2:]:
            state = self.services.setdefault(name, {"enabled": False, "active": False})
            state.update({"enable": {"enabled": True}, "disable": {"enabled": False}}.get(verb, {}))
            state.update(
                {"start": {"active": True}, "restart": {"active": True}, "stop": {"active": False}}.get(verb, {})
            )
        self.commands.append(" ".join(argv))
        return CommandResult(argv, 0, "", "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    root = tmp_path / "machine"
    root.mkdir()
    made = Machine(root, monkeypatch)
    pem = base64.b64encode(b"x").decode()
    for path, text in {
        "admin.conf": f"server: https://10.0.0.1:6443\ncertificate-authority-data: {pem}\n",
        "old": f"# theirs\npassword = {HIDDEN}\n",
    }.items():
        (root / path).write_text(text)
    monkeypatch.setattr(lock, "held", contextlib.nullcontext)
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(lock, "PATH", str(root / "lock"))
    monkeypatch.setattr(ledger, "PATH", str(root / "ledger/ledger.json"))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(root / "admin.conf"))
    monkeypatch.setattr(kubeconfig, "KUBELET", str(root / "kubelet.conf"))
    monkeypatch.setattr(kube_api, "admin", lambda *_, **__: made.cluster)
    monkeypatch.setattr(packages, "detect", lambda: made.packages)
    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.getpwuid(os.getuid()))
    monkeypatch.setattr(
        services, "states", lambda names: {n: dict(made.services[n]) for n in names if n in made.services}
    )
    monkeypatch.setattr(firewall, "tables", list)
    monkeypatch.setattr(firewall, "clean", lambda *_: None)
    for module in (services, undo, reset, init, installation):
        monkeypatch.setattr(module, "run", made.run)
    monkeypatch.setattr(services, "must", made.run)
    return made


def run(name: str, parameters: Mapping[str, Any], capsys: pytest.CaptureFixture[str], **modes: bool) -> dict[str, Any]:
    """The result of a module; ``modes`` are ``check`` and ``diff``."""
    module = importlib.import_module(f"gpunodes.ansible.modules.{name}")
    arguments = {**parameters, **{f"_ansible_{mode}": value for mode, value in modes.items()}}
    capsys.readouterr()
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not result.get("failed"), result
    return result


Prepare = Callable[[Machine], Mapping[str, Any]]
"""Prepares a machine and returns the parameters of a module."""


def host(machine: Machine) -> dict[str, Any]:
    root = machine.root
    return {
        "wanted": {
            "packages": [{"name": "containerd", "version": "1.7.*", "hold": True}],
            "files": [
                {"path": f"{root}/deep/new", "content": "new\n"},
                {"path": f"{root}/old", "content": "ours\n"},
            ],
            "directories": [f"{root}/state"],
            "services": [{"name": "containerd"}],
        }
    }


def host_undo(machine: Machine) -> dict[str, Any]:
    converge(spec_from(host(machine)["wanted"]))
    (machine.root / "state").mkdir()
    (machine.root / "lists").write_text("an index")
    machine.monkeypatch.setattr(undo.Undoer, "_apt_lists", lambda _: [str(machine.root / "lists")])
    return {}


def kubeadm(machine: Machine) -> None:
    """A machine on which kubeadm only writes its files."""
    config = machine.root / "config.yaml"

    def work(verb: str, *_: Any) -> None:
        for path in (config, machine.root / f"{verb} ended"):
            path.write_text("")
        if verb == "init":
            (machine.root / "kube-apiserver.yaml").write_text("")
            machine.services["kubelet"] = {"enabled": True, "active": True}

    machine.monkeypatch.setattr(command, "run", work)
    machine.monkeypatch.setattr(command, "KUBELET_CONFIG", str(config))
    machine.monkeypatch.setattr(reset, "MANIFEST", str(machine.root / "kube-apiserver.yaml"))
    machine.monkeypatch.setattr(reset, "ETCD", str(machine.root / "etcd"))
    machine.monkeypatch.setattr(reset, "leftovers", lambda control_plane=False: [])


def kubeadm_init(machine: Machine) -> dict[str, Any]:
    kubeadm(machine)
    machine.monkeypatch.setattr(kubeconfig, "ADMIN", str(machine.root / "none"))

    def load(path: str) -> object:
        return machine.root if path == kubeconfig.ADMIN and Path(reset.MANIFEST).exists() else None

    machine.monkeypatch.setattr(kubeconfig, "load", load)
    machine.monkeypatch.setattr(init, "_missing_parts", lambda _: [])
    registered: dict[str, Any] = {"metadata": {"name": "control-1", "resourceVersion": "1"}, "spec": {}}
    machine.cluster.objects["/api/v1/nodes/control-1"] = registered
    key = {"secret": HIDDEN, "generated": init.RANDOM_KEY}
    return {
        "documents": [
            {"kind": "InitConfiguration", "certificateKey": HIDDEN, "nodeRegistration": {"name": "control-1"}}
        ],
        "files": {f"{machine.root}/encryption.json": {"keys": [key]}},
        "labels": {"gpunodes.dev/firewall": "ufw"},
    }


def kubeadm_join(machine: Machine) -> dict[str, Any]:
    kubeadm(machine)
    ended = machine.root / "join ended"
    role: Callable[[], str | None] = lambda: "worker" if ended.exists() else None  # noqa: E731 - short
    machine.monkeypatch.setattr(facts, "kubernetes", lambda: {"role": role(), "ca_hash": "sha256:0", "server": ""})
    return {"endpoint": "10.0.0.1:6443", "token": TOKEN, "ca_hash": "sha256:0", "registered": True}


def kubeadm_upgrade(machine: Machine) -> dict[str, Any]:
    """A worker whose kubelet is replaced as soon as kubeadm has ended."""
    kubeadm(machine)
    ended = machine.root / "ended"

    def work(*_: Any, finishes: bool) -> None:
        assert finishes
        ended.write_text("")
        (machine.root / "config.yaml").write_text("")

    def version(name: str) -> str:
        return "1.36.3" if name == "kubeadm" or ended.exists() else "1.35.4"

    machine.monkeypatch.setattr(command, "run", work)
    machine.monkeypatch.setattr(facts, "kubernetes", lambda: {"role": "worker"})
    machine.monkeypatch.setattr(versions, "program", version)
    machine.monkeypatch.setattr(versions, "MANIFESTS", str(machine.root / "manifests"))
    ledger.Ledger(kubeadm="join done").save()
    return {"version": "1.36.3", "timeouts": {"upgradeManifests": "9m"}}


def upgrade_fetch(machine: Machine) -> dict[str, Any]:
    parameters = completed(machine)
    package = {"name": "containerd", "version": "1.7.*", "replace": True}
    return {"wanted": {"packages": [package]}, "images": parameters["images"]}


def kubeadm_reset(machine: Machine) -> dict[str, Any]:
    ledger.Ledger(kubeadm="join done").save()
    state = tuple(str(machine.root / name) for name in ("cni", "kubelet"))
    for folder in state:
        Path(folder).mkdir()
        (Path(folder) / "file").write_text(HIDDEN)
    machine.monkeypatch.setattr(reset, "_STATE", state)
    machine.monkeypatch.setattr(reset, "_CNI_STATE", state[0])
    machine.monkeypatch.setattr(reset, "KUBELET", state[1])
    machine.monkeypatch.setattr(reset, "_CNI", str(machine.root / "net.d"))
    machine.monkeypatch.setattr(reset, "_LINKS", ())
    machine.monkeypatch.setattr(reset, "_networks", list)
    return {}


def kubeadm_join_control_plane(machine: Machine) -> dict[str, Any]:
    kubeadm(machine)
    ended = machine.root / "join ended"

    def state() -> dict[str, Any]:
        return {"role": "control_plane" if ended.exists() else None, "ca_hash": "sha256:0", "server": "", "etcd": True}

    machine.monkeypatch.setattr(facts, "kubernetes", state)
    machine.monkeypatch.setattr(shared_certificates, "FOLDER", str(machine.root))
    return {
        "endpoint": "10.0.0.10:6443",
        "ca_hash": "sha256:0",
        "token": TOKEN,
        "certificate_key": HIDDEN,
        "files": {f"{machine.root}/encryption.json": json.dumps({"kind": "EncryptionConfiguration", "key": HIDDEN})},
        "node": "worker-1",
        "address": "10.0.0.2",
        "registered": True,
    }


def join_certificates_absent(machine: Machine) -> dict[str, Any]:
    folder = f"{kube_api.SYSTEM}/secrets"
    machine.cluster.objects[f"{folder}/kubeadm-certs"] = {"metadata": {"name": "kubeadm-certs"}, "data": {"a": ENCODED}}
    machine.cluster.objects[f"{folder}/bootstrap-token-abcdef"] = {
        "metadata": {"name": "bootstrap-token-abcdef"},
        "data": {"description": shared_certificates._OWNER, "token-secret": ENCODED},
    }
    return {"state": "absent"}


def etcd_member_absent(machine: Machine) -> dict[str, Any]:
    found = [Member(number, f"cp-{number}", [f"10.0.0.{number}"], ["url"], learner=False) for number in (1, 2)]
    machine.monkeypatch.setattr(etcd, "members", lambda: [each for each in found if each.number not in machine.images])
    machine.monkeypatch.setattr(etcd, "healthy", lambda asked: {each.id for each in asked})
    machine.monkeypatch.setattr(etcd, "leader", lambda: 2)
    machine.monkeypatch.setattr(etcd, "move_leader", lambda *_: machine.commands.append("move-leader"))
    machine.monkeypatch.setattr(etcd, "remove_member", lambda member: machine.images.add(member.number))
    return {"state": "absent", "address": "10.0.0.2"}


def kube_objects(machine: Machine) -> dict[str, Any]:
    path = "/api/v1/namespaces/kube-system/secrets/login"
    metadata = {"name": "login", "namespace": "kube-system"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    machine.cluster.objects[path] = {**secret, "data": {"password": "b2xk"}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": "config"}}
    return {
        "objects": [
            {**secret, "data": {"password": ENCODED}},
            {**config, "data": {"app.toml": f'level = "debug"\ntoken = "{HIDDEN}"\n'}},
        ]
    }


def join_token_absent(machine: Machine) -> dict[str, Any]:
    machine.cluster.objects[f"{kube_api.SYSTEM}/secrets/bootstrap-token-abcdef"] = {
        "metadata": {"name": "bootstrap-token-abcdef"},
        "data": {"description": base64.b64encode(b"gpunodes join").decode(), "token-secret": ENCODED},
    }
    return {"state": "absent"}


def node_pools(_: Machine) -> dict[str, Any]:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    return {"nodes": {"worker-1": {"labels": {"gpunodes.dev/pool": "a100"}, "taints": [taint]}}}


def node_removed(machine: Machine) -> dict[str, Any]:
    def drain(*_: Any) -> bool:
        machine.commands.append("drain")
        return True

    machine.monkeypatch.setattr(removal, "_drain", drain)
    machine.monkeypatch.setattr(removed_nodes, "_is_in_force", lambda _: True)
    return {"name": "worker-1"}


def images_of_docker(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(docker_images, "present", lambda name: name in machine.images)
    machine.monkeypatch.setattr(docker_images, "_load", machine.images.update)
    machine.monkeypatch.setattr(docker_images, "kubeadm_images", lambda _: [])
    return {"images": ["ghcr.io/flannel:1"], "mirrored": ["ghcr.io"]}


def image_of_archive(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(image_loaded, "_digest", lambda name: "sha256:0" if name in machine.images else "")

    def load(argv: list[str], *_: Any) -> CommandResult:
        machine.images.add("gpunodes.dev/gpunodes:1")
        return machine.run(argv)

    machine.monkeypatch.setattr(image_loaded, "run", load)
    return {"name": "gpunodes.dev/gpunodes:1", "digests": ["sha256:0"], "archive": str(machine.root / "image.tar")}


def completed(machine: Machine) -> dict[str, Any]:
    """A machine whose containerd lacks an image, and has an id."""
    folder = machine.root / "containerd"
    (folder / "introspection").mkdir(parents=True)
    (folder / "introspection" / "uuid").write_text("its id")
    ledger.Ledger(directories=[str(folder)]).save()
    machine.monkeypatch.setattr(prepared, "IDS", {str(folder): "introspection/uuid"})

    def pull(name: str, _: float) -> CommandResult:
        machine.images.add(name)
        return CommandResult([], 0, "", "")

    machine.monkeypatch.setattr(images, "pull", pull)
    machine.monkeypatch.setattr(images, "fetching", lambda: False)
    machine.monkeypatch.setattr(images, "lister", lambda: lambda name: name in machine.images)
    return {"images": ["registry.k8s.io/pause:3.10"]}


def certificates_renewed(machine: Machine) -> dict[str, Any]:
    """A control plane with one old certificate."""
    ended = machine.root / "renewed"
    old = Certificate("", 0, 86400)
    machine.monkeypatch.setattr(renewal, "_due", lambda _: {} if ended.exists() else {"apiserver.crt": old})
    machine.monkeypatch.setattr(renewal, "_check_authorities", lambda _: None)
    machine.monkeypatch.setattr(renewal, "_has", lambda name: name == "kube-apiserver")
    machine.monkeypatch.setattr(renewal, "_older", lambda _: False)
    machine.monkeypatch.setattr(renewal, "_check_served", lambda *_: None)
    machine.monkeypatch.setattr(renewal, "_run_kubeadm", lambda: ended.write_text(""))
    machine.monkeypatch.setattr(renewal, "_PKI", str(machine.root))
    machine.monkeypatch.setattr(static_pods, "restart", lambda name, *_: machine.commands.append(f"restart {name}"))
    (machine.root / "ca.crt").write_text("")
    return {}


def control_plane_settings(machine: Machine) -> dict[str, Any]:
    """A control plane whose scheduler has another argument, and a variable that is a secret."""
    ledger.Ledger(kubeadm="init done").save()
    applied = machine.root / "applied"
    each = drift.Drift("kube-scheduler", "--v", "2", "4")
    hidden = drift.Drift("kube-scheduler", "--token", HIDDEN, "x")

    def compare(*_: Any) -> Compared:
        found = () if applied.exists() else (each, hidden)
        return Compared(found, {}, {}, {"kube-scheduler": "new"}, (), "10.0.0.1", "control-1")

    machine.monkeypatch.setattr(compared, "compare", compare)
    machine.monkeypatch.setattr(compared, "own_client", lambda *_: machine.cluster)
    machine.monkeypatch.setattr(compared, "manifest", lambda _: "old")
    machine.monkeypatch.setattr(settings, "KEPT", str(machine.root / "kept"))
    machine.monkeypatch.setattr(settings, "_restart", lambda *_: applied.write_text(""))
    return {"configuration": {}}


def etcd_stopped(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(etcd_upload, "check_authority", lambda _: None)
    machine.monkeypatch.setattr(static_pod_files, "FOLDER", str(machine.root))
    machine.monkeypatch.setattr(static_pods, "AWAY", str(machine.root / "away"))
    machine.monkeypatch.setattr(containers, "ids", lambda *_: [])
    (machine.root / "etcd.yaml").write_text("")
    return {"snapshot": "a" * 64, "ca_hash": "sha256:0", "etcd_version": "3.6.8"}


def etcd_restored(machine: Machine) -> dict[str, Any]:
    ledger.Ledger(etcd_restore={"snapshot": "a" * 64, "state": "swapped", "before": "gpunodes-before-1"}).save()
    machine.monkeypatch.setattr(static_pod_files, "FOLDER", str(machine.root))
    machine.monkeypatch.setattr(etcd_snapshot, "DATA", str(machine.root))
    machine.monkeypatch.setattr(static_pods, "is_ready", lambda _: True)
    machine.monkeypatch.setattr(etcd_restore, "_verify", lambda *_: None)
    return {"snapshot": "a" * 64, "revision": 7}


def etcd_restore_aborted(machine: Machine) -> dict[str, Any]:
    ledger.Ledger(etcd_restore={"snapshot": "a" * 64, "state": "stopped"}, manifests={"etcd": "away"}).save()
    machine.monkeypatch.setattr(static_pod_files, "FOLDER", str(machine.root))
    machine.monkeypatch.setattr(static_pods, "AWAY", str(machine.root / "away"))
    machine.monkeypatch.setattr(etcd_snapshot, "DATA", str(machine.root))
    machine.monkeypatch.setattr(containers, "ids", lambda *_: [])
    (machine.root / "member").mkdir()
    return {}


def os_upgraded(machine: Machine) -> dict[str, Any]:
    """A machine with one pending package, and a kernel that is refused."""

    def run(*arguments: str) -> CommandResult:
        if "--simulate" not in arguments:
            machine.commands.append(" ".join(arguments))
        pending = f"Inst bash [1] (2 Debian:13/stable [amd64])\n{KERNEL}" if not machine.commands else ""
        return CommandResult(arguments, 0, pending if "upgrade" in arguments else "", "")

    machine.packages.there["linux-image-amd64"] = packages.PackageState("1", held=False)
    machine.monkeypatch.setattr(os_upgrade, "apt", run)
    machine.monkeypatch.setattr(os_upgrade, "_apt_only", lambda: None)
    machine.monkeypatch.setattr(locks, "wait", lambda *_: None)
    machine.monkeypatch.setattr(reboot, "reasons", list)
    return {"state": "applied", "refused": {"6.1.0-99-amd64": "it does not build"}}


KERNEL = """\
Inst linux-image-6.1.0-99-amd64 (2 Debian:13/stable [amd64])
Inst linux-image-amd64 [1] (2 Debian:13/stable [amd64])
"""


def driver_upgraded(machine: Machine) -> dict[str, Any]:
    """A machine whose driver is to be replaced; what does that is tested in test_driver_upgrade.py."""

    def stage(_: Any, check: bool = False) -> driver_upgrade.Outcome:
        if "580" in machine.images:
            return driver_upgrade.Outcome()
        if not check:
            machine.images.add("580")
        return driver_upgrade.Outcome(["download"], [Difference("kept drivers", {}, {"580": "kept"})], "580")

    machine.monkeypatch.setattr(driver_upgrade, "prepare", stage)
    return {"state": "prepared", "wanted": {"driver": {"modules": ["nvidia"]}}}


def runtime_upgraded(machine: Machine) -> dict[str, Any]:
    """A machine whose runtime is to be replaced; what does that is tested in test_runtime_upgrade.py."""

    def stage(_: Any, check: bool = False) -> runtime_upgrade.Outcome:
        if "2.1.4" in machine.images:
            return runtime_upgrade.Outcome()
        if not check:
            machine.images.add("2.1.4")
        return runtime_upgrade.Outcome(["replace"], [Difference("packages", {"containerd": "1"}, {"containerd": "2"})])

    machine.packages.there["containerd"] = packages.PackageState("1.7.24-1", held=True)
    machine.monkeypatch.setattr(runtime_upgrade, "apply", stage)
    return {"state": "applied", "wanted": {"containerd": {"packages": [{"name": "containerd"}]}}}


def runtime_pending(machine: Machine) -> dict[str, Any]:
    found = runtime_store.Kept({"containerd": "2"}, {"containerd": "1"}), ["write x"]
    machine.monkeypatch.setattr(runtime_upgrade, "pending", lambda _: found)
    return {"wanted": {"containerd": {"packages": [{"name": "containerd"}]}}}


def addon_upgraded(machine: Machine) -> dict[str, Any]:
    """An add-on that is to be updated; what does that is tested in test_addons.py."""

    def stage(_: Any, __: float, check: bool) -> tuple[list[str], list[Difference]]:
        if "v2" in machine.images:
            return [], []
        if not check:
            machine.images.add("v2")
        return ["DaemonSet x"], [Difference("DaemonSet x", {"image": "v1"}, {"image": "v2"})]

    machine.monkeypatch.setattr(addons, "upgrade", stage)
    return {"objects": [{"kind": "DaemonSet"}]}


def addon_installed(machine: Machine) -> dict[str, Any]:
    """An optional add-on; tests/repair/test_addons.py applies real ones to a real API server."""

    def stage(_: Any, name: str, __: str, check: bool) -> tuple[list[str], list[Difference]]:
        if "v1" in machine.images:
            return [], []
        if not check:
            machine.images.add("v1")
        return [f"Deployment {name}"], [Difference(f"Deployment {name}", None, {"kind": "Deployment"})]

    machine.monkeypatch.setattr(optional, "up", stage)
    return {"name": "x", "version": "v1", "objects": [{"kind": "Deployment"}]}


def addon_pending(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(addons, "pending", lambda wanted: [{"name": wanted[0]["kind"]}])
    return {"objects": [{"kind": "DaemonSet"}]}


LOGIN = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "login", "namespace": "kube-system", "annotations": {}},
}
STORED = """apiServer: {}
apiVersion: kubeadm.k8s.io/v1beta4
controlPlaneEndpoint: 10.0.0.1:6443
kind: ClusterConfiguration
"""


def cluster_endpoint(machine: Machine) -> dict[str, Any]:
    machine.cluster.objects[api_certificate.KUBEADM_CONFIG] = {
        "metadata": {"name": "kubeadm-config", "resourceVersion": "1"},
        "data": {"ClusterConfiguration": STORED},
    }
    machine.cluster.pods = []
    machine.monkeypatch.setattr(api_certificate, "own_client", lambda: machine.cluster)
    return {"endpoint": "10.0.0.10:6443"}


def api_server_certificate(machine: Machine) -> dict[str, Any]:
    pair, manifest = machine.root / "apiserver.crt", machine.root / "kube-apiserver.yaml"
    manifest.write_text("    - --advertise-address=10.0.0.1\n")
    pair.write_text("10.0.0.1")
    machine.monkeypatch.setattr(facts, "API_SERVER", str(manifest))
    machine.monkeypatch.setattr(api_certificate, "CERTIFICATE", str(pair))
    machine.monkeypatch.setattr(certificate, "names_of_pem", str.split)
    machine.monkeypatch.setattr(api_certificate, "_make", lambda names, *_: pair.write_text(" ".join(names)))
    machine.monkeypatch.setattr(api_certificate, "_serves", lambda *_: True)
    machine.monkeypatch.setattr(static_pods, "restart", lambda name, *_: machine.commands.append(f"restart {name}"))
    return {"endpoint": "api.example:6443"}


def kubeconfigs(machine: Machine) -> dict[str, Any]:
    (machine.root / "kubelet.conf").write_text((machine.root / "admin.conf").read_text())
    machine.monkeypatch.setattr(facts, "API_SERVER", str(machine.root / "none"))
    machine.monkeypatch.setattr(node_endpoint, "_OF_PEOPLE", ())
    machine.monkeypatch.setattr(node_endpoint, "_OF_KUBELET", (str(machine.root / "kubelet.conf"),))
    machine.monkeypatch.setattr(node_endpoint, "verify", lambda *_: None)
    machine.monkeypatch.setattr(node_endpoint, "_wait_for_node", lambda *_: None)
    return {"endpoint": "10.0.0.10:6443", "node": "worker-1"}


def virtual(machine: Machine) -> dict[str, Any]:
    wanted = {
        "files": [{"path": f"{machine.root}/keepalived.conf", "content": "new\n"}],
        "services": [{"name": "keepalived"}],
    }
    return {"wanted": wanted, "address": "192.0.2.10"}


def gpu_sliced(machine: Machine) -> dict[str, Any]:
    """Two GPUs without instances."""
    board = Board(machine.root / "capabilities")
    machine.monkeypatch.setattr(mig, "CAPABILITIES", str(board.capabilities))
    machine.monkeypatch.setattr(mig, "describe_devices", lambda _: None)
    machine.monkeypatch.setattr(gpu_mig, "_run", board.run)
    machine.monkeypatch.setattr(gpu_mig, "UNIT", f"{machine.root}/unit")
    machine.monkeypatch.setattr(gpu_driver, "SYS", f"{machine.root}/sys")
    machine.monkeypatch.setattr(gpu_driver, "holders", lambda _: [])
    (machine.root / "sys/module/nvidia").mkdir(parents=True)
    return {
        "wanted": {"section": "gpu", "files": [{"path": gpu_mig.UNIT, "content": "new\n"}]},
        "layout": {"1g.10gb": 7},
    }


CHANGING: dict[str, tuple[Prepare, dict[str, Any]]] = {
    "burn_in_taint": (
        lambda _: {"node": "worker-1"},
        {"Node worker-1": ({"taints": []}, {"taints": [burn_in_taint.TAINT]})},
    ),
    "certificates_renewed": (
        certificates_renewed,
        {
            "certificates": ({"apiserver.crt": "ends 1970-01-02 00:00 UTC"}, {"apiserver.crt": "renewed"}),
            "static pods": ({}, {"kube-apiserver": "restarted"}),
        },
    ),
    "control_plane_settings": (
        control_plane_settings,
        {"settings of kube-scheduler": ({"--v": "2", "--token": "(secret 1)"}, {"--v": "4", "--token": "(secret 2)"})},
    ),
    "api_certificate": (
        api_server_certificate,
        {
            "names in {root}/apiserver.crt": ({"names": ["10.0.0.1"]}, {"names": ["10.0.0.1", "api.example"]}),
            "kube-apiserver": ({"certificate": "earlier"}, {"certificate": "present"}),
        },
    ),
    "cluster_endpoint": (
        cluster_endpoint,
        {
            "ConfigMap kubeadm-config": (
                STORED,
                STORED.replace("apiServer: {}", "apiServer:\n  certSANs:\n  - 10.0.0.1\n  - 10.0.0.10").replace(
                    "10.0.0.1:6443", "10.0.0.10:6443"
                ),
            )
        },
    ),
    "node_endpoint": (
        kubeconfigs,
        {
            "{root}/kubelet.conf": ({"server": "https://10.0.0.1:6443"}, {"server": "https://10.0.0.10:6443"}),
            "kubelet": ({"started with": "an earlier file"}, {"started with": "this one"}),
        },
    ),
    "virtual_address": (
        virtual,
        {
            "{root}/keepalived.conf": ("", "new\n"),
            "service keepalived": ({"enabled": False, "active": False}, {"enabled": True, "active": True}),
        },
    ),
    "docker_images": (images_of_docker, {"images in Docker": ({}, {"ghcr.io/flannel:1": "present"})}),
    "etcd_restore_aborted": (
        etcd_restore_aborted,
        {"etcd": ({"data": "stopped"}, {"data": "before the restore"})},
    ),
    "etcd_restored": (
        etcd_restored,
        {"etcd": ({"data": "present"}, {"data": f"of the snapshot {'a' * 16}"})},
    ),
    "etcd_stopped": (etcd_stopped, {"static pods": ({"etcd": "runs"}, {"etcd": "stopped"})}),
    "host": (
        host,
        {
            "{root}/deep/new": ("", "new\n"),
            "{root}/old": ("# theirs\npassword = (secret 1)\n", "ours\n"),
            "held packages": ({}, {"containerd": "held"}),
            "packages": None,  # in check mode the versions are not known
            "service containerd": ({"enabled": False, "active": False}, {"enabled": True, "active": True}),
        },
    ),
    "host_undo": (
        host_undo,
        {
            "{root}/deep/new": ("new\n", ""),
            "{root}/old": ("ours\n", "# theirs\npassword = (secret 1)\n"),
            "folders": ({"{root}/deep": "present", "{root}/state": "present"}, {}),
            "held packages": ({"containerd": "held"}, {}),
            "indices of package sources": ({"{root}/lists": "present"}, {}),
            "ledger of changes": ({"{root}/ledger/ledger.json": "present"}, {}),
            "packages": ({"containerd": "1.7.24-1", "runc": "1.1"}, {}),
            "service containerd": ({"enabled": True, "active": True}, {"enabled": False, "active": False}),
        },
    ),
    "gpu_mig": (
        gpu_sliced,
        {
            "MIG instances": ({"GPU-0": "no MIG", "GPU-1": "no MIG"}, {"GPU-0": "7 x 1g.10gb", "GPU-1": "7 x 1g.10gb"}),
            "{root}/unit": ("", "new\n"),
        },
    ),
    "gpu_upgrade": (driver_upgraded, {"kept drivers": ({}, {"580": "kept"})}),
    "addon": (addon_installed, {"Deployment x": ("", {"kind": "Deployment"})}),
    "addon_upgrade": (addon_upgraded, {"DaemonSet x": ({"image": "v1"}, {"image": "v2"})}),
    "runtime_upgrade": (runtime_upgraded, {"packages": ({"containerd": "1"}, {"containerd": "2"})}),
    "os_upgrade": (
        os_upgraded,
        {"packages": ({"bash": "1"}, {"bash": "2"}), "held packages": ({}, {"linux-image-amd64": "held"})},
    ),
    "shared_folders": (
        lambda machine: {"folders": [f"{machine.root}/srv/share"]},
        {"folders": ({}, {"{root}/srv": "present", "{root}/srv/share": "present"})},
    ),
    "image_loaded": (
        image_of_archive,
        {"images": ({"gpunodes.dev/gpunodes:1": "missing"}, {"gpunodes.dev/gpunodes:1": "sha256:0"})},
    ),
    "join_token": (join_token_absent, {"join tokens": ({"bootstrap-token-abcdef": "present"}, {})}),
    "kube_objects": (
        kube_objects,
        {
            "ConfigMap config": (
                "",
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "config", "namespace": "kube-system", "annotations": {}},
                    "data": {"app.toml": 'level = "debug"\ntoken = (secret 1)\n'},
                },
            ),
            "Secret login": (
                LOGIN | {"data": {"password": "(secret 1)"}},
                LOGIN | {"data": {"password": "(secret 2)"}},
            ),
        },
    ),
    "kubeadm_init": (
        kubeadm_init,
        {
            "configuration of kubeadm init": (
                {},
                {
                    "documents": [
                        {
                            "kind": "InitConfiguration",
                            "certificateKey": "(secret 1)",
                            "nodeRegistration": {"name": "control-1"},
                        }
                    ],
                    "patches": {},
                },
            ),
            "kubeadm": ({"control plane": "none"}, {"control plane": "complete"}),
            "{root}/encryption.json": ("", "(secret 1)"),
            "Node control-1": (
                {"labels": {}, "annotations": {}},
                {
                    "labels": {"gpunodes.dev/firewall": "ufw"},
                    "annotations": {pools.MANAGED: '{"labels": ["gpunodes.dev/firewall"], "taints": []}'},
                },
            ),
        },
    ),
    "kubeadm_join": (
        kubeadm_join,
        {
            "configuration of kubeadm join": (
                {},
                {
                    "apiVersion": "kubeadm.k8s.io/v1beta4",
                    "kind": "JoinConfiguration",
                    "discovery": {
                        "bootstrapToken": {
                            "token": "(secret 1)",
                            "apiServerEndpoint": "10.0.0.1:6443",
                            "caCertHashes": ["sha256:0"],
                        }
                    },
                },
            ),
            "kubeadm": ({"worker": "none"}, {"worker": "complete"}),
        },
    ),
    "kubeadm_upgrade": (
        kubeadm_upgrade,
        {
            "kubeadm upgrade": ({"version": "1.35.4"}, {"version": "1.36.3"}),
            "configuration of kubeadm upgrade node": (
                {},
                {
                    "document": {
                        "apiVersion": "kubeadm.k8s.io/v1beta4",
                        "kind": "UpgradeConfiguration",
                        "apply": {"kubernetesVersion": "v1.36.3", "imagePullSerial": False},
                        "node": {"imagePullSerial": False},
                        "timeouts": {"upgradeManifests": "9m"},
                    },
                    "patches": {},
                },
            ),
        },
    ),
    "upgrade_fetch": (
        upgrade_fetch,
        {
            "downloaded packages": ({}, {"containerd": "1.7.*"}),
            "images": ({}, {"registry.k8s.io/pause:3.10": "present"}),
        },
    ),
    "kubeadm_reset": (
        kubeadm_reset,
        {"changes of kubeadm": ({"{root}/cni": "present", "{root}/kubelet": "present"}, {})},
    ),
    "node_pools": (
        node_pools,
        {
            "Node worker-1": (
                {"labels": {}, "annotations": {}, "taints": []},
                {
                    "labels": {"gpunodes.dev/pool": "a100"},
                    "annotations": {
                        pools.MANAGED: '{"labels": ["gpunodes.dev/pool"], "taints": ["nvidia.com/gpu:NoSchedule"]}'
                    },
                    "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
                },
            )
        },
    ),
    "node_registration": (
        lambda _: {"node": "worker-1", "provider_id": "gpunodes://worker-1"},
        {"Node worker-1": ({"providerID": ""}, {"providerID": "gpunodes://worker-1"})},
    ),
    "node_removed": (
        node_removed,
        {
            "nodes": ({"worker-1": "present"}, {}),
            "pods": ({"default/web": "on worker-1"}, {}),
            "refused nodes": ({}, {"worker-1": "removed"}),
        },
    ),
    "prepared": (
        completed,
        {
            "ids of the machine": ({"{root}/containerd/introspection/uuid": "present"}, {}),
            "images": ({}, {"registry.k8s.io/pause:3.10": "present"}),
        },
    ),
    "etcd_member": (
        etcd_member_absent,
        {
            "leader of etcd": ({"id": "2"}, {"id": "another"}),
            "members of etcd": ({"cp-2": "10.0.0.2"}, {}),
        },
    ),
    "join_certificates": (
        join_certificates_absent,
        {"certificates for joins": ({"bootstrap-token-abcdef": "present", "kubeadm-certs": "present"}, {})},
    ),
    "kubeadm_join_control_plane": (
        kubeadm_join_control_plane,
        {
            "configuration of kubeadm join": (
                {},
                {
                    "document": {
                        "apiVersion": "kubeadm.k8s.io/v1beta4",
                        "kind": "JoinConfiguration",
                        "discovery": {
                            "bootstrapToken": {
                                "token": "(secret 1)",
                                "apiServerEndpoint": "10.0.0.10:6443",
                                "caCertHashes": ["sha256:0"],
                            }
                        },
                        "controlPlane": {
                            "localAPIEndpoint": {"advertiseAddress": "10.0.0.2"},
                            "certificateKey": "(secret 2)",
                        },
                        "patches": {"directory": "/run/gpunodes/patches"},
                    },
                    "patches": {},
                },
            ),
            "kubeadm": ({"control plane": "none"}, {"control plane": "complete"}),
            "{root}/encryption.json": ("", "(secret 1)"),
        },
    ),
}
"""Modules that change something: a machine on which they do, and the differences, (before, after) by title."""


def host_diff(machine: Machine) -> dict[str, Any]:
    return {"wanted": {"role": host(machine)["wanted"]}}


def host_facts(machine: Machine) -> dict[str, Any]:
    def read(sources: Any, *given: Any, **more: Any) -> Any:
        return {"sources": list(sources), "gpus": given[-1], **more}

    machine.monkeypatch.setattr(facts, "read", read)
    return {"sources": [], "expected_gpus": ["2330"], "exact_packages": {"nvidia": ["nvidia-open"]}}


def cluster_info(machine: Machine) -> dict[str, Any]:
    described = [nodes.describe(node, ()) for node in [NODE]]
    machine.monkeypatch.setattr(nodes, "info", lambda required: {"required": required, "nodes": described})
    return {"required": True}


def read_for_upgrade(machine: Machine) -> dict[str, Any]:
    def read(
        sources: upgrade_facts.Sources, cluster: bool, patches: dict[str, Any], timeouts: dict[str, Any]
    ) -> dict[str, Any]:
        return {"url": sources.url, "cluster": cluster, "patches": patches, "timeouts": timeouts}

    machine.monkeypatch.setattr(upgrade_facts, "read", read)
    return {"url": "http://mirror/", "cluster": True}


def gpu_probe(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(document, "read", lambda options: {"deadline": options.deadline_s})
    return {"deadline": 5}


def certificate_ends(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(certificates, "report", lambda: [{"name": "apiserver"}])
    return {}


def etcd_members(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(etcd_snapshot, "members", lambda: {"problem": "", "members": []})
    return {}


def control_plane_drift(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(compared, "report", lambda wanted, **_: {"patches": dict(wanted.patches)})
    return {"configuration": {}, "patches": {"etcd+merge": {}}}


def read_kubelets(machine: Machine) -> dict[str, Any]:
    machine.monkeypatch.setattr(kubelet_settings, "report", lambda fields: {"nodes": {"worker-1": list(fields)}})
    return {"fields": ["maxPods"]}


def os_pending(machine: Machine) -> dict[str, Any]:
    os_upgraded(machine)
    return {}


READING: dict[str, Prepare] = {
    "certificate_ends": certificate_ends,
    "control_plane_drift": control_plane_drift,
    "etcd_members": etcd_members,
    "cluster_info": cluster_info,
    "gpu_idle": lambda _: {"node": "worker-1"},
    "gpu_probe": gpu_probe,
    "host_diff": host_diff,
    "host_facts": host_facts,
    "kubelet_settings": read_kubelets,
    "nfs_unmounted": lambda _: {"shares": ["nas.example:/export/training"]},
    "nfs_unused": lambda _: {},
    "os_pending": os_pending,
    "addon_pending": addon_pending,
    "runtime_pending": runtime_pending,
    "virtual_address_info": lambda _: {"address": "192.0.2.10"},
    "upgrade_facts": read_for_upgrade,
}
"""Modules that only read."""

VERIFYING: dict[str, tuple[dict[str, Any], Any, str]] = {
    "gpu_burn_in": ({"level": 1}, burn_in, "burn_in"),
    "gpu_nccl": ({"nodes": {"gpu-1": 1, "gpu-2": 1}, "image": "x"}, nccl_test, "measure"),
    "gpu_served": ({"nodes": {"gpu-1": 1}, "image": "x"}, gpu_cluster, "verify"),
    "gpu_verify": ({"image": "x"}, gpu_verify, "verify"),
    "storage_claims": ({"claims": [{"namespace": "default", "name": "training"}], "image": "x"}, storage, "verify"),
    "node_upgraded": ({"node": "worker-1", "kubelet": "1.36.3"}, upgraded, "wait"),
    "node_ready": ({"nodes": ["worker-1"], "image": "x"}, readiness, "wait_until_ready"),
}
"""Modules that do nothing in check mode, and the function that does their work."""


def support(name: str, mode: str) -> str:
    return str(documents(name)["DOCUMENTATION"]["attributes"][f"{mode}_mode"]["support"])


def test_every_module_has_a_case() -> None:
    assert {*CHANGING, *READING, *VERIFYING} == set(MODULES)
    assert {name for name in MODULES if support(name, "diff") != "none"} == set(CHANGING)
    assert {name for name in MODULES if support(name, "check") == "full"} == {*CHANGING, *READING}


def placed(text: Any, root: Path) -> Any:
    return json.loads(json.dumps(text).replace("{root}", str(root)))


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_module(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """In check mode it changes nothing and shows what it would change; then it changes that, and then nothing more."""
    prepare, expected = CHANGING[name]
    parameters = prepare(machine)
    before = machine.state()
    would = run(name, parameters, capsys, check_mode=True, diff=True)
    quiet = run(name, parameters, capsys, check_mode=True)
    assert vars_of(machine.state()) == vars_of(before)
    assert would["changed"]
    assert "diff" not in quiet
    assert {key: value for key, value in would.items() if key != "diff"} == quiet
    did = run(name, parameters, capsys, diff=True)
    assert did["changed"]
    again = run(name, parameters, capsys, diff=True)
    assert not again["changed"]
    assert "diff" not in again
    for result in (would, did):
        differences = {each["before_header"]: [each["before"], each["after"]] for each in result["diff"]}
        assert set(differences) == set(placed(list(expected), machine.root))
        for title, sides in placed(expected, machine.root).items():
            assert sides is None or differences[title] == sides, title
        assert all(each["before"] != each["after"] for each in result["diff"])
        assert not [secret for secret in SECRETS if secret in json.dumps(result["diff"])]
    if name != "host":
        assert would["diff"] == did["diff"]


def vars_of(state: Any) -> Any:
    """A state in a form that can be compared."""
    return [vars(each) if isinstance(each, Packages) else each for each in state]


@pytest.mark.parametrize("name", READING)
def test_a_reading_module(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """It returns the same in check mode, and changes nothing in either mode."""
    parameters = READING[name](machine)
    before = machine.state()
    would = run(name, parameters, capsys, check_mode=True, diff=True)
    did = run(name, parameters, capsys, diff=True)
    assert vars_of(machine.state()) == vars_of(before)
    assert would == did
    assert not did["changed"]
    assert "diff" not in did


@pytest.mark.parametrize("name", VERIFYING)
def test_a_verifying_module(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """It does nothing in check mode."""
    parameters, module, function = VERIFYING[name]
    machine.monkeypatch.setattr(module, function, lambda *_: pytest.fail("it verifies"))
    result = run(name, parameters, capsys, check_mode=True, diff=True)
    assert not result.pop("changed")
    assert not any(value for key, value in result.items() if key != "invocation")


def test_what_would_restart_docker_is_deferred_once_it_is_installed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = host(machine)["wanted"]
    parameters = {"wanted": {"docker": wanted, "node": wanted}, "deferred": ["docker"]}
    first = run("host_diff", parameters, capsys)
    assert (first["pending"], first["notes"]) == (["docker", "node"], [])
    machine.packages.there["containerd"] = packages.PackageState("1.7.24-1", held=True)
    then = run("host_diff", parameters, capsys)
    assert then["pending"] == ["node"]
    [note] = then["notes"]
    assert note.startswith("docker: its changes would restart Docker, and stop its pods; `gpunodes runtime upgrade`")


def test_a_new_join_token_is_not_shown(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    before = machine.state()
    would = run("join_token", {"ttl": 60}, capsys, check_mode=True, diff=True)
    assert vars_of(machine.state()) == vars_of(before)
    did = run("join_token", {"ttl": 60}, capsys, diff=True)
    assert did["token"]
    assert would["diff"] == did["diff"]
    (difference,) = did["diff"]
    assert (difference["before"], difference["after"]) == ("", {"token": "(secret 1)", "lifetime": "60 s"})


def test_labels_of_a_node_that_has_not_joined_yet_are_changes(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """In check mode its machine has not joined, and the cluster may not exist."""
    parameters = node_pools(machine)
    del machine.cluster.objects["/api/v1/nodes/worker-1"]
    for _ in range(2):
        result = run("node_pools", parameters, capsys, check_mode=True, diff=True)
        assert result["nodes"] == ["worker-1"]
        assert result["diff"][0]["after"]["labels"] == {"gpunodes.dev/pool": "a100"}
        machine.monkeypatch.setattr(kubeconfig, "ADMIN", str(machine.root / "none"))
    nothing: dict[str, Any] = {"nodes": {"worker-1": {"labels": {}, "taints": []}}}
    assert not run("node_pools", nothing, capsys, check_mode=True, diff=True)["changed"]
    assert not run("join_token", {"state": "absent"}, capsys, check_mode=True)["changed"]


def test_check_mode_does_not_start_a_stopped_kubelet(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = kubeadm_init(machine)
    run("kubeadm_init", parameters, capsys)
    machine.services["kubelet"]["active"] = False
    machine.commands.clear()
    machine.monkeypatch.setattr(pools, "_PAUSE_S", 0)
    assert not run("kubeadm_init", parameters, capsys, check_mode=True)["changed"]
    assert machine.commands == []
    run("kubeadm_init", parameters, capsys)
    assert machine.commands == ["systemctl start kubelet"]


PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modules": (
        {"modules": ["gpunodes_test"]},
        {"kernel modules": ({"gpunodes_test": "not loaded"}, {"gpunodes_test": "loaded"})},
    ),
    "sysctls": ({"sysctls": {"kernel.domainname": "x"}}, {}),
    "swap": ({"swap_off": True}, {"swap": ({"/dev/x": "on"}, {"/dev/x": "off"})}),
    "driver": (
        {"driver": {"modules": ["nvidia"], "conflicting_module": "nouveau"}},
        {
            "kernel modules": (
                {"nouveau": "loaded", "nvidia": "not loaded"},
                {"nouveau": "not loaded", "nvidia": "loaded"},
            )
        },
    ),
    "devices": ({"devices": True}, {"{root}/cdi": ("", "(generated on the machine)\n")}),
    "module stream": ({"module_stream": "nvidia-driver:580"}, {"module streams": ({}, {"nvidia-driver": "580"})}),
    "members": (
        {"members": {"docker": ["root"]}},
        {"members of the group docker": ({}, {"root": "member"})},
    ),
    "images": ({"images": ["pause:3"]}, {"images": ({"pause:3": "interrupted"}, {"pause:3": "complete"})}),
    "generated": (
        {"generated": [{"path": "{root}/made", "command": ["/no/such/program"]}]},
        {"{root}/made": ("", "(generated on the machine)\n")},
    ),
    "firewall": (
        {"firewall": {"ports": {"tcp 6443": [], "udp 8472": ["10.0.0.1"]}}},
        {
            "rules of ufw": (
                {},
                {
                    "allow 6443/tcp": "added by gpunodes",
                    "allow from 10.0.0.1 to any port 8472 proto udp": "added by gpunodes",
                },
            )
        },
    ),
    "absent": ({"absent": ["{root}/ours"]}, {"{root}/ours": ("ours\n", "")}),
    "restart": (
        {"services": [{"name": "kubelet"}]},
        {"service kubelet": ({"started with": "earlier files"}, {"started with": "present files"})},
    ),
}


@pytest.fixture
def gpus(machine: Machine) -> Machine:
    """A machine with a GPU, interrupted pulls, active swap, and a ledger of everything."""
    root, patch = machine.root, machine.monkeypatch.setattr
    (root / "ours").write_text("ours\n")
    (root / "sys/module/nouveau").mkdir(parents=True)
    patch(gpu_driver, "SYS", str(root / "sys"))
    patch(gpu_driver, "CDI", str(root / "cdi"))
    patch(gpu_driver, "device_nodes", lambda: ["/dev/null"])
    patch(gpu_driver, "holders", lambda _: [])
    patch(packages, "stream_file", lambda _: str(root / "stream"))
    patch(users, "_exists", lambda _: True)
    patch(images, "was_interrupted", lambda _: True)
    patch(swap, "active_swaps", lambda _: ["/dev/x"])
    patch(ufw, "is_active", lambda: True)
    patch(ufw, "added", lambda: {"allow 9/tcp": "gpunodes"})
    patch(ufw, "is_installed", lambda: True)
    patch(nftables, "chains", list)
    patch(firewalld, "is_active", lambda: False)
    machine.services["kubelet"] = {"enabled": True, "active": True}
    ledger.Ledger(files={str(root / "ours"): ledger.OldFile(None)}, restarts=["kubelet"]).save()
    return machine


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_desired_state_shows_its_changes(part: str, gpus: Machine) -> None:
    wanted, expected = placed(PARTS[part], gpus.root)
    changes = converge(spec_from(wanted), check=True)
    assert 0 < len(changes.actions) <= len(changes.differences)
    found = {each["before_header"]: [each["before"], each["after"]] for each in shown(changes.differences)}
    assert found
    assert {title: found[title] for title in expected} == expected


def test_each_part_of_an_undo_shows_its_changes(gpus: Machine) -> None:
    (gpus.root / "sys/module/nvidia").mkdir()
    gpus.services["docker"] = {"enabled": True, "active": True}
    gpus.packages.there["x"] = packages.PackageState("1", held=True)
    for has in ("has_user", "has_group"):
        gpus.monkeypatch.setattr(users, has, lambda _: True)
    gpus.monkeypatch.setattr(users, "members", lambda _: ["u"])
    ledger.Ledger(
        packages=["x"],
        holds=["x"],
        directories=[str(gpus.root / "sys")],
        modules=["nvidia"],
        sysctls={"kernel.domainname": "x"},
        swaps=["/dev/null"],
        services={"docker": {"enabled": False, "active": False}},
        groups=["g"],
        users=["u"],
        members={"m": ["u"]},
        unloaded=["mgag200"],
        initramfs="rebuilt",
        firewalls={"ufw": ["allow 9/tcp", "allow 10/tcp"]},
    ).save()
    undoer = undo.Undoer(check=True)
    before = gpus.state()
    undoer.run()
    assert vars_of(gpus.state()) == vars_of(before)
    found = {each["before_header"] for each in shown(undoer.differences)}
    assert len(undoer.actions) <= len(undoer.differences)
    assert found >= {
        *("folders", "groups", "held packages", "initramfs", "kernel modules", "kernel settings", "ledger of changes"),
        *("members of the group m", "packages", "rules of ufw", "service docker", "swap", "users"),
    }
