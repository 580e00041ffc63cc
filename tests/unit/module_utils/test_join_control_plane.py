"""The join of another control plane: what it gets, which secrets stay where, and what an interruption leaves."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import facts, kube_api, kubeconfig, ledger
from gpunodes.ansible.module_utils.cluster import schedulable, tokens
from gpunodes.ansible.module_utils.kubeadm import certificates, command, join_control_plane, reset
from gpunodes.ansible.module_utils.kubeadm.certificates import Shared
from gpunodes.ansible.module_utils.kubeadm.join_control_plane import Cluster, Place
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

ENCRYPTION = json.dumps({"kind": "EncryptionConfiguration", "secret": "k"})
SECRETS = f"{kube_api.SYSTEM}/secrets"
CLUSTER = Cluster("10.0.0.100:6443", "sha256:0", "abcdef.0123456789abcdef")


class Api:
    """A cluster with Secrets, and Leases that these runs hold."""

    def __init__(self, *holders: str) -> None:
        self.secrets: dict[str, Any] = {}
        self.holders = holders

    def find(self, path: str) -> Any:
        return self.secrets.get(path)

    def get(self, path: str, **_: str) -> Any:
        if path == "/version":
            return {"gitVersion": "v1.36.3"}
        if path.endswith("/leases"):
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            specs = [{"holderIdentity": each, "renewTime": now, "leaseDurationSeconds": 60} for each in self.holders]
            return {"items": [{"spec": spec} for spec in specs]}
        return {"items": [each for each in self.secrets.values() if "token" in each["metadata"]["name"]]}

    def call(self, method: str, path: str, body: Any, *_: Any) -> None:
        assert method == "PATCH"
        self.secrets[path]["metadata"].update(body["metadata"])

    def delete(self, path: str) -> bool:
        return self.secrets.pop(path, None) is not None

    def upload(self) -> None:
        """What kubeadm does."""
        self.secrets[f"{SECRETS}/kubeadm-certs"] = {"metadata": {"name": "kubeadm-certs"}, "data": {}}
        token = {"metadata": {"name": "bootstrap-token-owner0"}, "data": {"description": certificates._OWNER}}
        self.secrets[f"{SECRETS}/bootstrap-token-owner0"] = token


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Api:
    made = Api()
    monkeypatch.setattr(kube_api, "admin", lambda *_: made)
    monkeypatch.setattr(command, "PRIVATE", str(tmp_path / "private"))
    monkeypatch.setattr(certificates, "FOLDER", str(tmp_path))
    monkeypatch.setattr(reset, "MANIFEST", str(tmp_path / "kube-apiserver.yaml"))
    return made


def kubeadm(monkeypatch: pytest.MonkeyPatch, api: Api) -> dict[str, Any]:
    """kubeadm that uploads; its command line and its configuration are kept."""
    seen: dict[str, Any] = {}

    def run(argv: list[str], *_: Any) -> CommandResult:
        path = Path(argv[4].partition("=")[2])
        seen.update(argv=argv, text=path.read_text(), mode=path.stat().st_mode & 0o777)
        api.upload()
        return CommandResult(argv, 0, "", "")

    monkeypatch.setattr(command, "run_while_connected", run)
    return seen


def test_each_join_has_its_own_key_which_is_on_no_command_line(
    monkeypatch: pytest.MonkeyPatch, api: Api, tmp_path: Path
) -> None:
    seen = kubeadm(monkeypatch, api)
    keys = []
    for _ in range(2):
        shared = certificates.share("me", 60)
        keys.append(shared.key)
        assert seen["argv"][:4] == ["kubeadm", "init", "phase", "upload-certs"]
        assert {"--upload-certs", "--skip-certificate-key-print"} < set(seen["argv"])
        assert shared.key not in " ".join(seen["argv"])
        assert f'"certificateKey": "{shared.key}"' in seen["text"]
        assert '"kubernetesVersion": "v1.36.3"' in seen["text"]
        assert seen["mode"] == 0o600
        assert not (tmp_path / "private").exists()
        assert len(bytes.fromhex(shared.key)) == 32
    assert keys[0] != keys[1]
    assert api.secrets[f"{SECRETS}/kubeadm-certs"]["metadata"]["annotations"] == {tokens.RUN: "me"}


def test_what_is_uploaded_is_deleted_with_its_token(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    kubeadm(monkeypatch, api)
    certificates.share("me", 60)
    other = {"metadata": {"name": "bootstrap-token-other0"}, "data": {"description": "Z3B1bm9kZXMgam9pbg=="}}
    api.secrets[f"{SECRETS}/bootstrap-token-other0"] = other
    monkeypatch.setattr(kubeconfig, "load", lambda _: object())
    names = ["bootstrap-token-owner0", "kubeadm-certs"]
    assert certificates.withdraw("me", check=True) == names
    assert len(api.secrets) == 3
    assert certificates.withdraw("me") == names
    assert list(api.secrets) == [f"{SECRETS}/bootstrap-token-other0"]
    assert certificates.withdraw("me") == []


def test_the_certificates_of_another_run_stay_while_it_holds_a_lease(monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    kubeadm(monkeypatch, api)
    certificates.share("other", 60)
    api.holders = ("other", "me")
    assert certificates.withdraw("me") == []
    with pytest.raises(MachineProblem, match="another command joins a control plane"):
        certificates.share("me", 60)
    # The other one was killed.
    api.holders = ("me",)
    assert certificates.share("me", 60).key
    assert len(certificates.withdraw("me")) == 2


def test_an_upload_that_was_killed_before_it_was_marked_is_deleted(api: Api) -> None:
    api.upload()
    api.holders = ("other",)
    assert len(certificates.withdraw("me")) == 2


def test_the_files_of_the_api_server(monkeypatch: pytest.MonkeyPatch, api: Api, tmp_path: Path) -> None:
    kubeadm(monkeypatch, api)
    (tmp_path / "encryption.json").write_text(ENCRYPTION)
    arguments = (
        *("--audit-log-path=/var/log/kubernetes/audit.log", "--client-ca-file=/etc/kubernetes/pki/ca.crt"),
        f"--encryption-provider-config={tmp_path}/encryption.json",
        *("--oidc-ca-file=/etc/oidc/ca.pem", f"--audit-policy-file={tmp_path}/audit-policy.json"),
    )
    Path(reset.MANIFEST).write_text("spec:\n" + "".join(f"    - {each}\n" for each in arguments))
    shared = certificates.share("", 60)
    assert shared.files == {f"{tmp_path}/encryption.json": ENCRYPTION}
    # It lacks its own audit policy: so would the other machine.
    assert shared.required == ["/etc/oidc/ca.pem", f"{tmp_path}/audit-policy.json"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/etc/shadow", ENCRYPTION),
        ("{folder}/../encryption.json", ENCRYPTION),
        ("{folder}/other.json", ENCRYPTION),
        ("{folder}/encryption.json", "root::0:0:"),
        ("{folder}/encryption.json", '{"kind": "Policy"}'),
        ("{folder}/encryption.json", "[]"),
        ("{folder}/encryption.json", None),
        ("{folder}/none", ""),
    ],
)
def test_no_other_file_is_taken_from_another_control_plane(api: Api, tmp_path: Path, path: str, text: Any) -> None:
    with pytest.raises(MachineProblem, match="which is none of the files of its API server"):
        certificates.place({path.format(folder=tmp_path): text}, [])
    assert list(tmp_path.iterdir()) == []
    assert api.secrets == {}


def test_the_administrators_own_files_must_be_there(api: Api, tmp_path: Path) -> None:
    assert api
    own = tmp_path / "ca.pem"
    with pytest.raises(MachineProblem, match=r"this machine lacks .*ca\.pem.*copy them from another control plane"):
        certificates.check_files({}, [str(own)])
    own.touch()
    certificates.check_files({}, [str(own)])


class Machine:
    """A machine that joins; kubeadm only writes a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {"role": None, "ca_hash": None, "server": "", "etcd": False}
        self.documents: list[Mapping[str, Any]] = []
        self.resets = 0
        self.leftovers: list[str] = []
        monkeypatch.setattr(ledger, "PATH", str(folder / "ledger/ledger.json"))
        monkeypatch.setattr(facts, "kubernetes", lambda: self.state)
        monkeypatch.setattr(kubeconfig, "KUBELET", str(folder / "kubelet.conf"))
        monkeypatch.setattr(command, "KUBELET_CONFIG", str(folder / "config.yaml"))
        monkeypatch.setattr(command, "run", self.kubeadm)
        monkeypatch.setattr(reset, "leftovers", lambda control_plane: self.leftovers)
        monkeypatch.setattr(reset, "reset", self.reset)
        monkeypatch.setattr(schedulable, "converge", lambda *_, **__: None)

    def kubeadm(self, verb: str, documents: Any, _: float, __: Any, patches: Any) -> None:
        assert verb == "join"
        assert ledger.load().kubeadm == "join started"
        assert patches == {"etcd0+strategic": {}}
        path = self.folder / "encryption.json"
        assert (path.read_text(), path.stat().st_mode & 0o777) == (ENCRYPTION, 0o600)
        self.documents += documents
        (self.folder / "config.yaml").touch()
        self.state = {"role": "control_plane", "ca_hash": "sha256:0", "server": "", "etcd": True}

    def reset(self) -> None:
        self.resets += 1
        self.leftovers = []

    def join(self, *, check: bool = False, registered: bool = False, cluster: Cluster = CLUSTER) -> list[str]:
        place = Place("cp-2", "10.0.0.2", registered, schedulable=False)
        files = {f"{self.folder}/encryption.json": ENCRYPTION}
        key = "00" * 32 if cluster.token else ""
        patches: dict[str, Any] = {"etcd0+strategic": {}}
        settings: dict[str, Any] = {"timeouts": {}}
        return join_control_plane.join(cluster, place, Shared(key, files, []), patches, settings, 60, check).actions


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, api: Api, tmp_path: Path) -> Machine:
    assert api
    return Machine(monkeypatch, tmp_path)


def test_a_bare_machine_becomes_a_control_plane(machine: Machine) -> None:
    assert machine.join(check=True) == ["kubeadm join"]
    assert list(machine.folder.iterdir()) == []
    assert machine.join() == ["kubeadm join"]
    (document,) = machine.documents
    assert document["controlPlane"] == {
        "localAPIEndpoint": {"advertiseAddress": "10.0.0.2"},
        "certificateKey": "00" * 32,
    }
    assert document["discovery"]["bootstrapToken"]["apiServerEndpoint"] == "10.0.0.100:6443"
    assert document["patches"] == {"directory": f"{command.PRIVATE}/patches"}
    assert ledger.load().kubeadm == "join done"
    assert machine.join(registered=True) == []
    assert len(machine.documents) == 1


def test_a_killed_join_starts_again(machine: Machine) -> None:
    ledger.Ledger(kubeadm="join started").save()
    machine.leftovers = ["/etc/kubernetes/kubelet.conf"]
    # In the learner window: everything is there but the node's label, which kubeadm sets behind it.
    machine.state = {"role": "control_plane", "ca_hash": "sha256:0", "server": "", "etcd": True}
    assert machine.join(check=True) == ["reset an earlier join", "kubeadm join"]
    assert machine.resets == 0
    assert machine.join() == ["reset an earlier join", "kubeadm join"]
    assert (machine.resets, len(machine.documents)) == (1, 1)


def test_a_join_that_was_killed_behind_kubeadm_is_finished(machine: Machine) -> None:
    ledger.Ledger(kubeadm="join started").save()
    (machine.folder / "config.yaml").touch()
    machine.state = {"role": "control_plane", "ca_hash": "sha256:0", "server": "", "etcd": True}
    assert machine.join(check=True, registered=True) == ["finish an interrupted kubeadm join"]
    assert ledger.load().kubeadm == "join started"
    assert machine.join(registered=True) == ["finish an interrupted kubeadm join"]
    assert ledger.load().kubeadm == "join done"
    assert (machine.documents, machine.resets) == ([], 0)


@pytest.mark.parametrize("progress", ["join done", "init done", ""])
def test_a_complete_control_plane_is_never_reset(machine: Machine, progress: str) -> None:
    """Its node or its label is gone; its data of etcd may be the last that there is."""
    ledger.Ledger(kubeadm=progress).save()
    machine.leftovers = ["/etc/kubernetes/admin.conf"]
    machine.state = {"role": "control_plane", "ca_hash": "sha256:0", "server": "", "etcd": True}
    with pytest.raises(MachineProblem, match=r"is no complete control plane of the cluster.*`gpunodes remove`"):
        machine.join()
    assert (machine.documents, machine.resets) == ([], 0)


def test_wrong_machines(machine: Machine) -> None:
    Path(kubeconfig.KUBELET).touch()
    machine.state = {"role": "control_plane", "ca_hash": "sha256:1", "server": "https://x", "etcd": True}
    with pytest.raises(MachineProblem, match="belongs to another cluster"):
        machine.join(registered=True)
    machine.state = {"role": "worker", "ca_hash": "sha256:0", "server": "", "etcd": False}
    with pytest.raises(MachineProblem, match="is a worker of the cluster"):
        machine.join()
    machine.state = {"role": None, "ca_hash": None, "server": "", "etcd": False}
    with pytest.raises(MachineProblem, match="no token and certificate key"):
        machine.join(cluster=Cluster("10.0.0.100:6443", "sha256:0", ""))
    assert machine.documents == []
