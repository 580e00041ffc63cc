"""A control plane and its settings: kubeadm, kubectl, the kubelet, the runtime and the API are those of the test."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import (
    certificate,
    containers,
    disk,
    etcd_snapshot,
    kube_api,
    ledger,
    static_pod_files,
)
from gpunodes.ansible.module_utils.kubeadm import (
    api_certificate,
    command,
    compared,
    drift,
    errors,
    expected,
    settings,
    static_pods,
    versions,
)
from gpunodes.ansible.module_utils.kubeadm.compared import Wanted
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

PODS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
FOLDER = "/etc/kubernetes/gpunodes"
VOLUME = {"name": "gpunodes", "hostPath": FOLDER, "mountPath": FOLDER, "readOnly": True, "pathType": "Directory"}
BROKEN = "no-such-flag"
FLAG = f"unknown flag: --{BROKEN}"


class Killed(BaseException):
    """The module was killed by SIGKILL here."""


def extra(**values: str) -> dict[str, Any]:
    return {"extraArgs": [{"name": name.replace("_", "-"), "value": value} for name, value in values.items()]}


def configuration(**components: Mapping[str, str]) -> dict[str, Any]:
    """The sections that settings decide; arguments by component."""
    api = {"encryption_provider_config": f"{FOLDER}/encryption.json", **components.get("api", {})}
    return {
        "apiServer": {**extra(**api), "extraVolumes": [VOLUME]},
        "controllerManager": extra(**components.get("manager", {})),
        "scheduler": extra(**components.get("scheduler", {})),
        "etcd": {"local": extra(**components.get("etcd", {}))},
    }


def stored() -> dict[str, Any]:
    made = configuration()
    made["etcd"]["local"]["dataDir"] = "/var/lib/etcd"
    made["apiServer"]["certSANs"] = ["10.0.0.1"]
    return {
        **made,
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "kubernetesVersion": "v1.36.3",
        "controlPlaneEndpoint": "10.0.0.1:6443",
        "networking": {"podSubnet": "10.244.0.0/16", "serviceSubnet": "10.96.0.0/12"},
        "dns": {"imageTag": "by hand"},
    }


def manifest(component: str, own: Mapping[str, Any], image: str, address: str, name: str) -> dict[str, Any]:
    """What kubeadm writes, in short."""
    arguments = {"kube-apiserver": {"advertise-address": address}, "etcd": {"name": name, "data-dir": "/var/lib/etcd"}}
    merged = {**arguments.get(component, {}), **{each["name"]: each["value"] for each in own.get("extraArgs", ())}}
    container = {
        "name": component,
        "command": [component, *(f"--{key}={value}" for key, value in merged.items())],
        "image": image,
        "volumeMounts": [
            {"name": each["name"], "mountPath": each["mountPath"]} for each in own.get("extraVolumes", ())
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": component}, "spec": {"containers": [container]}}


class ControlPlane:
    """A machine whose kubelet follows the folder of manifests at once, and its cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests = root / "manifests"
        self.stored = stored()
        self.started: dict[str, tuple[int, str]] = {}
        self.count = 0
        self.log: list[str] = []
        self.kill_at = 0
        self.members: list[dict[str, Any]] = [{"id": "1", "name": "cp-1", "healthy": True}]
        self.kubeadm = "1.36.3"
        self.refuses = ""
        self.names = ["10.0.0.1"]

    def step(self, what: str) -> None:
        """Something that the module does; it is killed before the step ``kill_at``."""
        self.log.append(what)
        if len(self.log) == self.kill_at:
            raise Killed

    def text(self, component: str) -> str:
        return (self.manifests / f"{component}.yaml").read_text()

    def write(self, component: str, pod: Any) -> None:
        (self.manifests / f"{component}.yaml").write_text(yaml.safe_dump(pod))

    def create(self) -> None:
        """As kubeadm init did."""
        self.manifests.mkdir(parents=True)
        for component, text in self.written(self.stored).items():
            (self.manifests / f"{component}.yaml").write_text(text)
        self.sync()

    def written(
        self,
        document: Mapping[str, Any],
        patches: Mapping[str, Any] | None = None,
        timeouts: Mapping[str, Any] | None = None,
    ) -> dict[str, str]:
        local = document["etcd"]["local"]
        images = {name: f"registry.k8s.io/{name}:{document['kubernetesVersion']}" for name in PODS}
        images["etcd"] = f"{local.get('imageRepository', 'registry.k8s.io')}/etcd:{local.get('imageTag', '3.6.8-0')}"
        made = {}
        for component, keys in drift.SECTIONS.items():
            own: Any = document
            for key in keys:
                own = own[key]
            pod = manifest(component, own, images[component], "10.0.0.1", "cp-1")
            # kubeadm 1.36 app/util/staticpod, StartupProbe: every 10 s, 4 minutes by default.
            minutes = int((timeouts or {}).get("controlPlaneComponentHealthCheck", "4m0s").partition("m")[0])
            pod["spec"]["containers"][0]["startupProbe"] = {"failureThreshold": 6 * minutes}
            pod["spec"] |= (patches or {}).get(component, {}).get("spec", {})
            made[component] = yaml.safe_dump(pod)
        return made

    def sync(self) -> None:
        """The kubelet."""
        for component in PODS:
            path = self.manifests / f"{component}.yaml"
            text = path.read_text() if path.exists() else None
            if text is None:
                self.started.pop(component, None)
            elif component not in self.started or self.started[component][1] != text:
                self.count += 1
                self.started[component] = (self.count, text)

    def ids(self, name: str, every: bool = False) -> list[str]:
        del every
        self.sync()
        return [f"{name}-{self.started[name][0]}"] if name in self.started else []

    def ready(self, name: str) -> bool:
        self.sync()
        return name in self.started and BROKEN not in self.started[name][1]

    def run(self, argv: Sequence[str], *_: Any, environment: Mapping[str, str] | None = None) -> CommandResult:
        if argv[0] == "kubectl":
            assert "--local" in argv, "no cluster is asked"
            path = next(each for each in argv if each.startswith("--filename=")).partition("=")[2]
            try:
                return CommandResult(argv, 0, json.dumps(yaml.safe_load(Path(path).read_text())), "")
            except yaml.YAMLError:
                return CommandResult(argv, 1, "", "error: error parsing")
        assert argv[:3] == ["kubeadm", "init", "phase"]
        assert argv[-1] == "--dry-run"
        if self.refuses:
            return CommandResult(argv, 1, "", f"error: {self.refuses}\nhint")
        config = next(each for each in argv if each.startswith("--config=")).partition("=")[2]
        assert str(config).startswith(str(self.root))
        init, document = (json.loads(each) for each in Path(config).read_text().split("\n---\n"))
        assert init["nodeRegistration"]["name"] == "cp-1"
        folder = Path(init["patches"]["directory"])
        patches = {path.name.partition("+")[0].rstrip("0"): json.loads(path.read_text()) for path in folder.iterdir()}
        for component, text in self.written(document, patches, init["timeouts"]).items():
            if ("etcd" in argv) == (component == "etcd"):
                assert environment is not None
                (Path(environment["KUBEADM_INIT_DRYRUN_DIR"]) / f"{component}.yaml").write_text(text)
        return CommandResult(argv, 0, "", "")

    def upload(self, verb: str, documents: Sequence[Any], *_: Any, finishes: bool) -> None:
        assert verb == "init phase upload-config kubeadm"
        assert finishes
        assert ledger.load().control_plane["kubeadm-config"], "the ledger comes first"
        self.step("upload")
        self.stored = copy.deepcopy(documents[1])
        self.step("uploaded")

    def get(self, path: str) -> Any:
        assert path == api_certificate.KUBEADM_CONFIG
        return {"data": {"ClusterConfiguration": yaml.safe_dump(self.stored)}}

    def add_names(self, names: Sequence[str], *_: Any, **__: Any) -> None:
        self.step("names")
        self.names += names

    def arguments(self, component: str) -> dict[str, str]:
        return drift.arguments(yaml.safe_load(self.text(component)), component)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    made = ControlPlane(tmp_path)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(expected, "FOLDER", str(tmp_path))
    monkeypatch.setattr(expected, "run", made.run)
    monkeypatch.setattr(static_pod_files, "FOLDER", str(made.manifests))
    monkeypatch.setattr(static_pods, "AWAY", str(tmp_path / "away"))
    monkeypatch.setattr(static_pods, "_POLL_S", 0.001)
    monkeypatch.setattr(static_pods, "is_ready", made.ready)
    monkeypatch.setattr(kube_api, "local_problem", lambda _: "" if made.ready("kube-apiserver") else "it starts")
    monkeypatch.setattr(kube_api, "local", lambda *_: made)
    monkeypatch.setattr(api_certificate, "add_names", made.add_names)
    monkeypatch.setattr(certificate, "names_of_pem", lambda _: made.names)
    monkeypatch.setattr(command, "run", made.upload)
    monkeypatch.setattr(containers, "ids", made.ids)
    monkeypatch.setattr(errors, "LOGS", str(tmp_path / "pods"))
    monkeypatch.setattr(etcd_snapshot, "members", lambda: {"problem": "", "members": made.members})
    monkeypatch.setattr(versions, "program", lambda _: made.kubeadm)
    for name, value in (("KEPT", str(tmp_path / "kept")), ("_SETTLE_S", 0), ("_RECOVERY_S", 0), ("_POLL_S", 0)):
        monkeypatch.setattr(settings, name, value)
    ledger.Ledger(kubeadm="init done").save()
    made.create()
    return made


def wanted(machine: ControlPlane | None = None, **components: Mapping[str, str]) -> Wanted:
    """The settings; with a machine also an audit policy."""
    given = configuration(**components)
    files = {str(machine.root / "audit-policy.json"): {"rules": [{"level": "Metadata"}]}} if machine else {}
    return Wanted(given, files=files)


def texts(given: Wanted) -> list[tuple[str, str, str | None, str | None, str]]:
    found = compared.report(given)
    assert found["problem"] == ""
    return [
        tuple(each[key] for key in ("component", "name", "running", "wanted", "kind")) for each in found["differences"]
    ]


def state(machine: ControlPlane) -> Any:
    return {name: machine.text(name) for name in PODS}, copy.deepcopy(machine.stored)


def test_a_new_control_plane_has_its_settings(machine: ControlPlane) -> None:
    assert compared.report(wanted()) == {
        "managed": True,
        "problem": "",
        "unverified": False,
        "differences": [],
        "left_out": 0,
    }
    before = state(machine)
    assert settings.apply(wanted(), 1, check=False).actions == []
    assert (state(machine), machine.log) == (before, [])
    assert not list(machine.root.glob("gpunodes-expected-*")), "nothing is left"


def test_what_an_upgrade_takes_away_from_the_manifests_of_others(machine: ControlPlane) -> None:
    """Of what kubeadm's configuration has nothing: free arguments, fixed ones, and volumes are written again."""
    pod = yaml.safe_load(machine.text("kube-apiserver"))
    machine.stored["scheduler"] = extra(v="3")
    machine.write("kube-scheduler", yaml.safe_load(machine.written(machine.stored)["kube-scheduler"]))
    assert compared.lost({}, {}, compared.own_client()) == []
    pod["spec"]["containers"][0]["command"] += ["--audit-log-path=/var/log/audit"]
    pod["spec"]["priority"] = 7
    machine.write("kube-apiserver", pod)
    found = compared.lost({}, {}, compared.own_client())
    assert [(each.component, each.name) for each in found] == [
        ("kube-apiserver", "--audit-log-path"),
        ("kube-apiserver", "spec.priority"),
    ]
    # Patches of the settings are applied again.
    patches = {"kube-apiserver0+strategic": {"spec": {"priority": 7}}}
    assert len(compared.lost(patches, {}, compared.own_client())) == 1


def test_a_changed_argument_is_shown_and_applied_once(machine: ControlPlane) -> None:
    given = wanted(scheduler={"v": "4"}, api={"v": "2"})
    assert texts(given) == [
        ("kube-apiserver", "--v", None, "2", "settings"),
        ("kube-scheduler", "--v", None, "4", "settings"),
    ]
    before, manager = state(machine), machine.ids("kube-controller-manager")
    would = settings.apply(given, 1, check=True)
    assert state(machine) == before
    did = settings.apply(given, 1, check=False)
    assert did == would
    assert did.actions == [
        "change kubeadm's configuration in the cluster",
        "restart kube-apiserver with its settings",
        "restart kube-scheduler with its settings",
    ]
    assert machine.arguments("kube-scheduler")["v"] == "4"
    assert machine.ids("kube-controller-manager") == manager, "only what differs is restarted"
    # Joins and upgrades get the settings too, and what the settings do not decide stays.
    assert drift.extra_arguments(machine.stored, "kube-scheduler") == {"v": "4"}
    assert machine.stored["dns"] == {"imageTag": "by hand"}
    assert machine.stored["apiServer"]["certSANs"] == ["10.0.0.1"]
    assert compared.report(given)["unverified"]
    settings.verify(given, check=False)
    assert ledger.load().control_plane == {}
    assert not (machine.root / "kept").exists()
    count = machine.count
    assert settings.apply(given, 1, check=False).actions == []
    assert texts(given) == []
    assert machine.count == count


def test_removed_settings_and_those_by_hand(machine: ControlPlane) -> None:
    given = wanted(scheduler={"v": "4"})
    settings.apply(given, 1, check=False)
    settings.verify(given, check=False)
    pod = yaml.safe_load(machine.text("kube-scheduler"))
    pod["spec"]["containers"][0]["command"].append("--by-hand=yes")
    pod["spec"]["priority"] = 7
    machine.write("kube-scheduler", pod)
    assert texts(wanted()) == [
        ("kube-scheduler", "--by-hand", "yes", None, "foreign"),
        ("kube-scheduler", "--v", "4", None, "settings"),
        ("kube-scheduler", "spec.priority", "7", None, "settings"),
    ]
    settings.apply(wanted(), 1, check=False)
    assert texts(wanted()) == []


def test_a_static_pod_that_does_not_start_takes_everything_back(machine: ControlPlane) -> None:
    given = wanted(machine, etcd={"quota": "8"}, api={"v": "2"}, scheduler={BROKEN.replace("-", "_"): "x"})
    before = state(machine)
    attempts = machine.root / "pods/kube-system_kube-scheduler-m_1/kube-scheduler"
    attempts.mkdir(parents=True)
    soon = time.time() + 60
    for attempt in "0.log", "1.log":
        lines = ("fine", f"Error: {FLAG}\x1b[2J")
        (attempts / attempt).write_text("".join(f"2026-11-29T03:20:01.1Z stderr F {line}\n" for line in lines))
        os.utime(attempts / attempt, (soon, soon))
    began = time.monotonic()
    with pytest.raises(MachineProblem) as raised:
        settings.apply(given, 60, check=False)
    assert time.monotonic() - began < 30, "with one control plane the cluster has no API meanwhile"
    text = str(raised.value)
    assert "the static pod kube-scheduler is not ready" in text
    assert f"kube-scheduler ended: Error: {FLAG}" in text
    assert "\x1b" not in text
    assert "the earlier settings are restored" in text
    assert state(machine) == before
    assert all(machine.ready(name) for name in PODS)
    assert ledger.load().control_plane == {}
    assert not (machine.root / "kept").exists()


def test_a_broken_api_server_is_taken_back_with_its_audit_policy(machine: ControlPlane) -> None:
    policy = machine.root / "audit-policy.json"
    policy.write_text('{"rules": []}')
    before = state(machine)
    with pytest.raises(MachineProblem, match="restored"):
        settings.apply(wanted(machine, api={BROKEN.replace("-", "_"): "x"}), 0.01, check=False)
    assert state(machine) == before
    assert json.loads(policy.read_text()) == {"rules": []}


def test_a_new_audit_policy_restarts_the_api_server(machine: ControlPlane) -> None:
    policy = machine.root / "audit-policy.json"
    policy.write_text('{"rules": []}')
    given = wanted(machine)
    assert texts(given) == [("audit policy", "audit-policy.json", "0 rules", "1 rule", "settings")]
    before = machine.ids("kube-apiserver")
    assert settings.apply(given, 1, check=False).actions == ["restart kube-apiserver with its settings"]
    assert machine.ids("kube-apiserver") != before
    assert policy.stat().st_mode & 0o777 == 0o600
    settings.verify(given, check=False)
    assert settings.apply(given, 1, check=False).actions == []


def test_an_interrupted_undo_restarts_the_api_server_with_its_earlier_audit_policy(
    machine: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server goes on with the policy that was taken back, until it happens to restart."""
    policy = machine.root / "audit-policy.json"
    policy.write_text('{"rules": []}')
    settings.apply(wanted(machine), 1, check=False)
    new = machine.ids("kube-apiserver")

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(settings, "_restart", killed)
        with pytest.raises(Killed):
            settings.undo(1, check=False)
    settings.undo(1, check=False)
    assert json.loads(policy.read_text()) == {"rules": []}
    assert machine.ids("kube-apiserver") != new
    assert not (machine.root / "kept").exists()


def test_after_an_apply_the_state_before_can_be_brought_back_until_it_is_verified(machine: ControlPlane) -> None:
    before, given = state(machine), wanted(scheduler={"v": "4"}, etcd={"quota": "8"})
    settings.apply(given, 1, check=False)
    # What else was changed in kubeadm's configuration meanwhile stays.
    machine.stored["controlPlaneEndpoint"] = "10.0.0.9:6443"
    assert settings.undo(1, check=True).actions == settings.undo(1, check=False).actions != []
    before[1]["controlPlaneEndpoint"] = "10.0.0.9:6443"
    assert state(machine) == before
    assert settings.undo(1, check=False).actions == []
    settings.apply(given, 1, check=False)
    machine.names.append("10.0.0.9")
    settings.verify(given, check=False)
    assert settings.undo(1, check=False).actions == []
    assert machine.arguments("kube-scheduler")["v"] == "4"


def test_a_manifest_of_before_an_upgrade_is_not_brought_back(machine: ControlPlane) -> None:
    settings.apply(wanted(scheduler={"v": "4"}), 1, check=False)
    upgraded = machine.text("kube-scheduler").replace("v1.36.3", "v1.36.4")
    (machine.manifests / "kube-scheduler.yaml").write_text(upgraded)
    settings.undo(1, check=False)
    assert machine.text("kube-scheduler") == upgraded


@pytest.mark.usefixtures("machine")
def test_verify_fails_while_something_differs_or_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineProblem, match="kube-scheduler still differs from the settings: --v"):
        settings.verify(wanted(scheduler={"v": "4"}), check=False)
    monkeypatch.setattr(static_pods, "is_ready", lambda name: name != "etcd")
    with pytest.raises(MachineProblem, match="etcd is not ready"):
        settings.verify(wanted(), check=False)


def test_what_was_decided_at_the_creation_stays(machine: ControlPlane) -> None:
    pod = yaml.safe_load(machine.text("etcd"))
    cluster = "--initial-cluster=cp-2=https://10.0.0.2:2380,cp-1=https://10.0.0.1:2380"
    pod["spec"]["containers"][0]["command"] += [cluster, "--initial-cluster-state=existing"]
    machine.write("etcd", pod)
    given = configuration(etcd={"data_dir": "/data", "quota": "8"})
    given["apiServer"] = {"extraArgs": [], "extraVolumes": []}
    networks = {"podSubnet": "10.1.0.0/16", "serviceSubnet": "10.96.0.0/12"}
    asked = Wanted(given, networks=networks)
    assert texts(asked) == [
        ("etcd", "--quota", None, "8", "settings"),
        ("etcd", "--data-dir", "/var/lib/etcd", "/data", "fixed"),
        ("kube-apiserver", "--encryption-provider-config", f"{FOLDER}/encryption.json", None, "fixed"),
        ("cluster", "podSubnet", "10.244.0.0/16", "10.1.0.0/16", "fixed"),
    ]
    api = machine.text("kube-apiserver")
    settings.apply(asked, 1, check=False)
    found = machine.arguments("etcd")
    assert (found["data-dir"], found["quota"]) == ("/var/lib/etcd", "8")
    assert (found["initial-cluster"], found["initial-cluster-state"]) == (cluster.partition("=")[2], "existing")
    assert machine.text("kube-apiserver") == api
    settings.verify(asked, check=False)


def test_encryption_is_not_switched_on(machine: ControlPlane) -> None:
    for section in (machine.stored["apiServer"],):
        section["extraArgs"], section["extraVolumes"] = [], []
    for component, text in machine.written(machine.stored).items():
        (machine.manifests / f"{component}.yaml").write_text(text)
    given = wanted()
    assert texts(given) == [
        ("kube-apiserver", "--encryption-provider-config", None, f"{FOLDER}/encryption.json", "fixed")
    ]
    assert settings.apply(given, 1, check=False).actions == []


def test_a_name_of_kubeadms_configuration_gets_into_the_certificate(machine: ControlPlane) -> None:
    machine.stored["apiServer"]["certSANs"] += ["API.example"]
    assert texts(wanted()) == [("API server's certificate", "API.example", None, "a name in it", "settings")]
    settings.apply(wanted(), 1, check=False)
    assert machine.names == ["10.0.0.1", "API.example"]
    settings.verify(wanted(), check=False)


@pytest.mark.usefixtures("machine")
def test_a_patch_is_a_setting() -> None:
    given = Wanted(configuration(), {"kube-apiserver0+strategic": {"spec": {"priority": 3}}})
    assert texts(given) == [("kube-apiserver", "spec.priority", None, "3", "settings")]
    settings.apply(given, 1, check=False)
    assert texts(given) == []


def test_time_limits_of_kubeadm_are_settings(machine: ControlPlane) -> None:
    """kubeadm writes the time that a static pod has for its start into its manifest."""
    timeouts = {"controlPlaneComponentHealthCheck": "10m0s"}
    made = machine.written(machine.stored, timeouts=timeouts)
    machine.write("etcd", yaml.safe_load(made["etcd"]))
    name = "spec.containers[{}].startupProbe.failureThreshold"
    assert texts(wanted()) == [("etcd", name.format("etcd"), "60", "24", "settings")]
    given = Wanted(configuration(), timeouts=timeouts)
    assert texts(given) == [(pod, name.format(pod), "24", "60", "settings") for pod in PODS if pod != "etcd"]
    assert len(compared.lost({}, timeouts, compared.own_client())) == len(PODS) - 1
    settings.apply(given, 1, check=False)
    assert texts(given) == []
    assert compared.lost({}, timeouts, compared.own_client()) == []


def test_images_stay(machine: ControlPlane) -> None:
    path = machine.manifests / "etcd.yaml"
    path.write_text(path.read_text().replace("registry.k8s.io/etcd:3.6.8-0", "mirror.example:5000/k8s/etcd:3.6.6-0"))
    scheduler = machine.manifests / "kube-scheduler.yaml"
    scheduler.write_text(scheduler.read_text().replace("registry.k8s.io/", "mirror.example/"))
    assert texts(wanted()) == []
    settings.apply(wanted(etcd={"quota": "8"}, scheduler={"v": "4"}), 1, check=False)
    assert "image: mirror.example:5000/k8s/etcd:3.6.6-0\n" in path.read_text()
    assert "image: mirror.example/kube-scheduler:v1.36.3\n" in scheduler.read_text()


def test_every_interruption_is_continued(machine: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before each write of a file, and around the upload: the next run brings it to its settings."""
    write, made = disk.write, 0
    policy = machine.root / "audit-policy.json"
    given = wanted(machine, api={"v": "2"}, scheduler={"v": "4"})
    kill_at = 0

    def killing(path: str, *more: Any) -> None:
        nonlocal made
        if not Path(path).parent.name.startswith(("gpunodes-expected", "patches")):
            made += 1
            if made == kill_at:
                raise Killed
        write(path, *more)

    monkeypatch.setattr(disk, "write", killing)
    original, earlier = state(machine), machine.stored
    for number in range(1, 60):
        made, kill_at = 0, number
        for name, text in original[0].items():
            (machine.manifests / f"{name}.yaml").write_text(text)
        machine.stored = copy.deepcopy(earlier)
        policy.write_text('{"rules": []}')
        try:
            settings.apply(given, 1, check=False)
        except Killed:
            pass
        else:
            assert number > 12, "it was killed often enough"
            break
        kill_at = 0
        if number % 2:
            # Undone by another command instead: everything is as before.
            settings.undo(1, check=False)
            assert state(machine)[0] == original[0]
            assert drift.extra_arguments(machine.stored, "kube-scheduler") == {}
            assert json.loads(policy.read_text()) == {"rules": []}
        settings.apply(given, 1, check=False)
        settings.verify(given, check=False)
        assert machine.arguments("kube-scheduler")["v"] == "4"
        assert ledger.load() == ledger.Ledger(kubeadm="init done")
    else:
        pytest.fail("it never ended")


def test_a_killed_change_that_broke_the_api_server_is_repaired_first(
    machine: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = settings._restart

    def killed(*given: Any) -> None:
        text = machine.text(given[0]).replace("- --advertise", f"- --{BROKEN}=x\n    - --advertise")
        (machine.manifests / f"{given[0]}.yaml").write_text(text)
        raise Killed

    before = state(machine)
    monkeypatch.setattr(settings, "_restart", killed)
    with pytest.raises(Killed):
        settings.apply(wanted(api={"v": "2"}), 1, check=False)
    assert not machine.ready("kube-apiserver")
    monkeypatch.setattr(settings, "_restart", restart)
    settings.apply(wanted(), 1, check=False)
    assert state(machine)[0] == before[0]
    settings.verify(wanted(), check=False)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"kubeadm": ""}, "gpunodes did not make this machine a control plane"),
        ({"kubeadm": "join started"}, "has not finished"),
        ({"kubeadm": "init done", "upgrade": "apply"}, "an upgrade of this control plane is not finished"),
        ({"kubeadm": "init done", "etcd_restore": {"state": "x"}}, "a restore of etcd"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_other_machines_are_refused(entries: Any, message: str) -> None:
    ledger.Ledger(**entries).save()
    with pytest.raises(MachineProblem, match=message):
        settings.apply(wanted(scheduler={"v": "4"}), 1, check=False)
    assert compared.report(wanted())["managed"] == entries["kubeadm"].endswith("done")


@pytest.mark.usefixtures("machine")
def test_a_control_plane_of_others_is_compared_on_request_only() -> None:
    ledger.Ledger().save()
    given = wanted(scheduler={"v": "4"})
    assert compared.report(given)["differences"] == []
    found = compared.report(given, foreign=True)
    assert [(each["component"], each["name"], each["wanted"]) for each in found["differences"]][:1] == [
        ("kube-scheduler", "--v", "4")
    ]
    assert not found["managed"], "its settings are never changed"


def test_an_undo_does_not_start_what_a_restore_of_etcd_stopped(machine: ControlPlane) -> None:
    away = machine.root / "away/etcd.yaml"
    away.parent.mkdir()
    (machine.manifests / "etcd.yaml").rename(away)
    begun = ledger.Ledger(
        kubeadm="init done",
        manifests={"etcd": str(away)},
        control_plane={"etcd": "done"},
        etcd_restore={"state": "stopped"},
    )
    begun.save()
    with pytest.raises(MachineProblem, match="a restore of etcd has stopped"):
        settings.undo(1, check=False)
    assert away.exists()
    assert ledger.load() == begun


def test_a_member_that_is_down_stops_a_restart_of_etcd_only(machine: ControlPlane) -> None:
    machine.members.append({"id": "2", "name": "cp-2", "healthy": False})
    before = state(machine)
    with pytest.raises(MachineProblem, match="the member cp-2 of etcd does not respond"):
        settings.apply(wanted(etcd={"quota": "8"}), 1, check=False)
    assert state(machine) == before
    settings.apply(wanted(scheduler={"v": "4"}), 1, check=False)


def test_what_kubeadm_refuses_changes_nothing(machine: ControlPlane) -> None:
    machine.refuses = "unknown patch target"
    before = state(machine)
    with pytest.raises(MachineProblem, match="kubeadm refuses the settings of the control plane: error: unknown patch"):
        settings.apply(wanted(scheduler={"v": "4"}), 1, check=False)
    assert state(machine) == before
    machine.refuses, machine.kubeadm = "", "1.37.0"
    assert "kubeadm 1.37.0 is not of the version" in compared.report(wanted())["problem"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "{spec: 7}",
        "{spec: {containers: {}}}",
        "{spec: {containers: [7, {name: etcd, command: 7}]}}",
        f"{{spec: {{containers: [{{name: etcd, command: [etcd, '--name=cp-1', '--x={'y' * 5000}', 7, null]}}]}}}}",
        "{spec: {containers: [{name: etcd, command: [etcd, '--name=$(touch /tmp/x)']}]}}",
        "{spec: {containers: [{name: etcd, image: \"x\\n  evil: true\", command: [etcd, '--name=cp-1']}]}}",
        "{spec: {containers: [{name: etcd, command: [etcd, '--name=cp-1']}], a: " + "[" * 60 + "]" * 60 + "}}",
    ],
)
def test_a_hostile_manifest_is_a_problem_or_a_short_difference(machine: ControlPlane, text: str) -> None:
    (machine.manifests / "etcd.yaml").write_text(text)
    found = compared.report(wanted())
    assert found["problem"] or found["differences"]
    assert all(len(each[key] or "") <= 100 for each in found["differences"] for key in ("running", "wanted"))


def test_a_missing_manifest_is_a_problem(machine: ControlPlane) -> None:
    (machine.manifests / "kube-scheduler.yaml").unlink()
    assert "kube-scheduler.yaml does not exist" in compared.report(wanted())["problem"]
    (machine.manifests / "kube-apiserver.yaml").unlink()
    assert not compared.report(wanted())["managed"], "it is no control plane yet"


def test_values_of_the_environment_are_not_shown(machine: ControlPlane) -> None:
    pod = yaml.safe_load(machine.text("kube-scheduler"))
    pod["spec"]["containers"][0]["env"] = [{"name": "HTTPS_PROXY", "value": "http://user:hunter2@proxy"}]
    machine.write("kube-scheduler", pod)
    assert "hunter2" not in json.dumps(compared.report(wanted()))
    assert texts(wanted())
    # Containers without names of their own are shown as a whole.
    pod["spec"]["containers"] += [{"env": [{"value": "hunter2"}]}]
    machine.write("kube-scheduler", pod)
    assert "hunter2" not in json.dumps(compared.report(wanted()))
