"""kubeadm init and join: what is configured, what an interruption leaves, and why they fail."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import facts, kube_api, kubeconfig, ledger, pools, process, static_pod_files
from gpunodes.ansible.module_utils.host import services
from gpunodes.ansible.module_utils.kubeadm import command, errors, init, join, reset, static_pods
from gpunodes.ansible.module_utils.problem import MachineProblem, Problem
from gpunodes.ansible.module_utils.process import CommandResult


def test_failed_checks_come_first() -> None:
    text = (
        "[preflight] Running pre-flight checks\n[preflight] Some fatal errors occurred:\n"
        "\t[ERROR Port-10250]: Port 10250 is in use\n\t[ERROR Swap]: running with swap on is not supported\n"
        "error: error execution phase preflight: preflight checks failed\n"
    )
    assert errors.kubeadm_error(text).found == (
        "[ERROR Port-10250]: Port 10250 is in use; [ERROR Swap]: running with swap on is not supported"
    )


def test_images_are_not_listed_one_by_one() -> None:
    text = "\t[ERROR ImagePull]: [failed to pull image a: no, failed to pull image b: no]\n"
    assert errors.kubeadm_error(text).found == "[ERROR ImagePull]: [failed to pull image a: no; and others"


def test_the_phase_that_failed() -> None:
    text = (
        "error execution phase kubelet-wait-bootstrap: failed while waiting for TLS bootstrap\n"
        "To see the stack trace of this error execute with --v=5 or higher\n"
    )
    message = errors.kubeadm_error(text).found
    assert message == "error execution phase kubelet-wait-bootstrap: failed while waiting for TLS bootstrap"
    done = CommandResult(["kubeadm"], 1, "", text)
    failure = errors.failure("join", done, Problem("kubelet: no such host", remedy="check DNS"))
    assert failure.problem == Problem(f"kubeadm join: {message}; kubelet: no such host", remedy="check DNS")
    assert failure.output == text


DEADLINE = "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
CONNECT = f"could not connect to the container runtime: failed to create new CRI runtime service: {DEADLINE}"
SLOW = (
    f"[ERROR CRI]: {CONNECT}",
    f"\t[ERROR CRI]: {CONNECT}\n\t[ERROR ContainerRuntimeVersion]: {CONNECT}",
    f"\t[ERROR ContainerRuntimeVersion]: could not check if the runtime config is available: {DEADLINE}",
    # Of an upgrade, and of a control plane that joins.
    f"error: error execution phase preflight: [preflight] Some fatal errors occurred:\n\t[ERROR ImagePull]: {CONNECT}",
)
OTHERS = (
    "[ERROR Port-10250]: Port 10250 is in use",
    f"[ERROR CRI]: {CONNECT}\n[ERROR Port-10250]: Port 10250 is in use",
    f"[ERROR ImagePull]: failed to pull image registry.k8s.io/pause:3.10.2: {DEADLINE}",
)


@pytest.mark.parametrize("other", OTHERS)
def test_a_slow_runtime_is_asked_again_and_another_failure_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str
) -> None:
    calls = iter([*SLOW, other, ""])
    monkeypatch.setattr(command, "PRIVATE", str(tmp_path / "private"))
    monkeypatch.setattr(command, "_PAUSE_S", 0)
    monkeypatch.setattr(command, "cause_of_wait", lambda _: None)
    monkeypatch.setattr(command, "run_while_connected", lambda argv, *_: CommandResult(argv, 1, "", next(calls)))
    with pytest.raises(MachineProblem, match=r"Port 10250 is in use|failed to pull image"):
        command.run("join", [{"kind": "JoinConfiguration"}], 60)
    assert list(calls) == [""]


def test_the_job_before_an_upgrade_gets_three_minutes_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = '[ERROR CreateJob]: Job "check-1" in the namespace "kube-system" did not complete in 1m0s: ...'
    asked: list[str] = []
    monkeypatch.setattr(command, "PRIVATE", str(tmp_path / "private"))
    monkeypatch.setattr(command, "_PAUSE_S", 0)
    monkeypatch.setattr(command, "cause_of_wait", lambda _: None)

    def run(argv: list[str], *_: object) -> CommandResult:
        asked.append(slow)
        return CommandResult(argv, 1, "", slow)

    monkeypatch.setattr(process, "run_to_end", run)
    with pytest.raises(MachineProblem, match="did not complete in 1m0s"):
        command.run("upgrade apply", [{"kind": "UpgradeConfiguration"}], 600, finishes=True)
    assert len(asked) == 3


def test_patches_are_files_that_kubeadm_finds_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private = tmp_path / "private"
    seen: dict[str, str] = {}

    def run(argv: list[str], *_: object) -> CommandResult:
        seen.update((path.name, path.read_text()) for path in (private / "patches").iterdir())
        return CommandResult(argv, 0, "", "")

    monkeypatch.setattr(command, "PRIVATE", str(private))
    monkeypatch.setattr(command, "run_while_connected", run)
    command.run("init", [], 60, patches={"etcd0+strategic": {"spec": {"priority": 1}}})
    assert seen == {"etcd0+strategic.json": '{"spec": {"priority": 1}}'}
    assert not private.exists()
    assert init._complete({"kind": "InitConfiguration"}, "t")["patches"] == {"directory": f"{private}/patches"}


def test_the_kubelet_is_quoted_only_where_it_matters() -> None:
    done = CommandResult(["kubeadm"], 1, "", "\t[ERROR Mem]: 900 MB is less than 1700 MB\n")
    failure = errors.failure("init", done, Problem("something old"))
    assert str(failure) == "kubeadm init: [ERROR Mem]: 900 MB is less than 1700 MB"
    done = CommandResult(["kubeadm"], 1, "", "\t[ERROR Port-10250]: Port 10250 waits for a connection\n")
    assert "something old" not in str(errors.failure("init", done, Problem("something old")))


def test_why_the_kubelet_ended() -> None:
    journal = (
        'E1121 13:24:01.100000     890 run.go:72] "command failed" err="failed to run Kubelet: running with swap"\n'
        'I1121 13:24:02.100000     890 server.go:1] "Starting"\n'
    )
    assert errors.parse_kubelet(journal) == Problem("failed to run Kubelet: running with swap")


def test_the_last_error_line() -> None:
    journal = 'E1121 13:24:01.1     890 a.go:1] "first" err="x"\nE1121 13:24:02.1     890 b.go:2] "second" err="y"\n'
    assert errors.parse_kubelet(journal) == Problem('"second" err="y"')
    assert errors.parse_kubelet("") is None


def test_that_the_node_is_not_there_yet_is_no_cause() -> None:
    missing = (
        'E1129 03:20:09.1     890 event.go:359] "Server rejected event" err="node \\"control-1\\" not found"\n'
        'E1129 03:20:10.1     890 kubelet.go:1] "Unable to register mirror pod because node is not registered yet" '
        'err="node \\"control-1\\" not found" node="control-1"\n'
    )
    cause = 'E1129 03:20:01.1     890 pod_workers.go:1] "Error syncing pod" err="failed to create containerd task"\n'
    found = errors.parse_kubelet(cause + missing)
    assert found == Problem('"Error syncing pod" err="failed to create containerd task"')
    assert errors.parse_kubelet(missing) is not None


def test_keys_are_made_on_the_machine_for_root_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two clusters never share a key, kubeadm finds it when it starts, the kubelet's configuration is for root."""
    seen: list[dict[str, Any]] = []
    path = tmp_path / "gpunodes" / "encryption.json"
    config = tmp_path / "config.yaml"

    def run(verb: str, *_: Any) -> None:
        seen.append({"verb": verb, **json.loads(path.read_text())})
        config.write_text("")
        config.chmod(0o644)

    monkeypatch.setattr(reset, "MANIFEST", str(tmp_path / "none"))
    monkeypatch.setattr(reset, "ETCD", str(tmp_path / "none"))
    monkeypatch.setattr(command, "KUBELET_CONFIG", str(config))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(tmp_path / "none"))
    monkeypatch.setattr(kubeconfig, "KUBELET", str(tmp_path / "none"))
    monkeypatch.setattr(reset, "leftovers", lambda control_plane=False: [])
    monkeypatch.setattr(command, "begin", lambda *_, **__: None)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(kube_api, "admin", lambda: Api({}))
    monkeypatch.setattr(ledger, "load", lambda *_: ledger.Ledger())
    monkeypatch.setattr(ledger.Ledger, "save", lambda *_: None)
    files = {str(path): {"secret": init.RANDOM_KEY}}
    assert init.init([], {}, files, 60, check=True).actions == ["kubeadm init"]
    assert not path.exists()
    for _ in range(2):
        init.init([], {}, files, 60, check=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert config.stat().st_mode & 0o777 == 0o600
    assert len({one["secret"] for one in seen}) == 2
    assert {len(one["secret"]) for one in seen} == {44}


class Api:
    """A cluster whose init came to its end, with these bootstrap tokens: descriptions by name."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self.tokens = tokens

    def get(self, path: str, **_: str) -> Any:
        data = {
            name: {"description": base64.b64encode(message.encode()).decode()} for name, message in self.tokens.items()
        }
        items = [{"metadata": {"name": name}, "data": each} for name, each in data.items()]
        return {"items": items} if path.endswith("/secrets") else {}

    def find(self, _: str) -> Any:
        return {"metadata": {"resourceVersion": "1"}}

    def delete(self, path: str) -> None:
        del self.tokens[path.rpartition("/")[2]]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose kubeadm ended well, and whose run was killed just behind it; its kubelet's configuration."""
    pem = base64.b64encode(b"x").decode()
    for name in ("admin", "manifest"):
        (tmp_path / name).write_text(f"server: https://127.0.0.1\ncertificate-authority-data: {pem}\n")
    config = tmp_path / "config.yaml"
    config.write_text("")
    config.chmod(0o644)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(tmp_path / "admin"))
    monkeypatch.setattr(reset, "MANIFEST", str(tmp_path / "manifest"))
    monkeypatch.setattr(command, "KUBELET_CONFIG", str(config))
    monkeypatch.setattr(services, "states", lambda _: {"kubelet": {"active": True}})
    return config


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_init_that_was_killed_behind_kubeadm_is_finished(monkeypatch: pytest.MonkeyPatch, killed: Path) -> None:
    """kubeadm's own token goes, of all that there are, and the kubelet's configuration is root's alone."""
    ledger.Ledger(kubeadm="init started").save()
    tokens = {"bootstrap-token-a": "kubeadm init", "bootstrap-token-b": "gpunodes join", "bootstrap-token-c": ""}
    monkeypatch.setattr(kube_api, "admin", lambda **_: Api(tokens))
    done = ["finish an interrupted kubeadm init"]
    assert init.init([], {}, {}, 60, check=True).actions == done
    assert (mode(killed), len(tokens), ledger.load().kubeadm) == (0o644, 3, "init started")
    assert init.init([], {}, {}, 60, check=False).actions == done
    assert (mode(killed), list(tokens)) == (0o600, ["bootstrap-token-b", "bootstrap-token-c"])
    assert ledger.load().kubeadm == "init done"
    assert init.init([], {}, {}, 60, check=False).actions == []


def test_an_init_that_was_killed_before_anybody_could_use_the_cluster_is_started_again(
    monkeypatch: pytest.MonkeyPatch, killed: Path
) -> None:
    """The API server responds, but kubeadm has not let the administrator in yet. Seen on a virtual machine."""

    class Closed(Api):
        def find(self, path: str) -> Any:
            raise kube_api.ApiError(403, 'User "kubernetes-admin" cannot get resource "configmaps"')

    monkeypatch.setattr(kube_api, "admin", lambda **_: Closed({}))
    ledger.Ledger(kubeadm="init started").save()
    assert init.init([], {}, {}, 60, check=True).actions == ["reset an interrupted kubeadm init", "kubeadm init"]
    # The administrator's rights were taken away later, or the init was nearly done: the cluster may be in use.
    monkeypatch.setattr(init, "_finalised", lambda: True)
    with pytest.raises(MachineProblem, match="cannot get resource"):
        init.init([], {}, {}, 60, check=True)
    monkeypatch.setattr(init, "_finalised", lambda: False)
    ledger.Ledger(kubeadm="init done").save()
    with pytest.raises(MachineProblem, match="cannot get resource"):
        init.init([], {}, {}, 60, check=True)
    assert killed.exists()


def test_a_node_of_another_name_than_its_machine_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, killed: Path
) -> None:
    """`kubeadm init --node-name` of others: the role pool knows by the machine's identity which node to label."""

    class Other(Api):
        def find(self, path: str) -> Any:
            return None if path.startswith("/api/v1/nodes/") else super().find(path)

    monkeypatch.setattr(kube_api, "admin", lambda **_: Other({}))
    monkeypatch.setattr(pools, "REGISTERS_S", 0.0)
    labels = init.Node(labels={"gpunodes.dev/firewall": "ufw"})
    for check in (True, False):
        assert init.init([], {}, {}, 60, check, labels).actions == []
    assert killed.exists()


def test_a_control_plane_whose_manifest_an_interrupted_run_left_away_is_started(
    monkeypatch: pytest.MonkeyPatch, killed: Path
) -> None:
    """After a power cut in a restart of its API server no roll-out can be resumed, which needs the API."""
    manifests, away = killed.parent / "manifests", killed.parent / "away"
    for folder in (manifests, away):
        folder.mkdir()
    monkeypatch.setattr(static_pod_files, "FOLDER", str(manifests))
    monkeypatch.setattr(static_pods, "AWAY", str(away))
    monkeypatch.setattr(reset, "MANIFEST", str(manifests / "kube-apiserver.yaml"))
    monkeypatch.setattr(facts, "API_SERVER", str(manifests / "kube-apiserver.yaml"))
    monkeypatch.setattr(kube_api, "admin", lambda **_: Api({}))
    moved = away / "kube-apiserver.yaml"
    moved.write_text("    - --advertise-address=10.0.0.1\n")
    ledger.Ledger(kubeadm="init done", manifests={"kube-apiserver": str(moved)}).save()
    assert facts.kubernetes()["advertised"] == "10.0.0.1"
    done = ["start kube-apiserver, which an interrupted run stopped"]
    assert init.init([], {}, {}, 60, check=True).actions == done
    assert moved.exists()
    assert init.init([], {}, {}, 60, check=False).actions == done
    assert (manifests / "kube-apiserver.yaml").exists()
    assert ledger.load() == ledger.Ledger(kubeadm="init done")
    assert init.init([], {}, {}, 60, check=False).actions == []


def test_a_control_plane_that_a_restore_of_etcd_stopped_is_not_started(killed: Path) -> None:
    manifests = {"etcd": str(killed)}
    ledger.Ledger(kubeadm="init done", manifests=manifests, etcd_restore={"state": "begun"}).save()
    with pytest.raises(MachineProblem, match=r"a restore of etcd has stopped .* finish `gpunodes etcd restore`"):
        init.init([], {}, {}, 60, check=False)
    assert ledger.load().manifests == manifests


def test_a_join_that_was_killed_behind_kubeadm_is_finished(monkeypatch: pytest.MonkeyPatch, killed: Path) -> None:
    monkeypatch.setattr(facts, "kubernetes", lambda: {"role": "worker", "ca_hash": "pin", "server": ""})
    ledger.Ledger(kubeadm="join started").save()
    flags = killed.parent / "kubeadm-flags.env"
    flags.write_text('KUBELET_KUBEADM_ARGS="--node-ip=10.0.0.2 --register-with-taints=a:NoSchedule --v=2"\n')
    monkeypatch.setattr(join, "_FLAGS", str(flags))
    done = ["finish an interrupted kubeadm join"]
    assert join.join("", "", "pin", registered=True, settings={}, limit_s=60, check=True).actions == done
    assert (mode(killed), ledger.load().kubeadm) == (0o644, "join started")
    assert join.join("", "", "pin", registered=True, settings={}, limit_s=60, check=False).actions == done
    assert (mode(killed), ledger.load().kubeadm) == (0o600, "join done")
    # A pool that scales registers the node with other taints, in a file that these would override.
    assert flags.read_text() == 'KUBELET_KUBEADM_ARGS="--node-ip=10.0.0.2 --v=2"\n'
    assert join.join("", "", "pin", registered=True, settings={}, limit_s=60, check=False).actions == []


@pytest.mark.parametrize(
    ("ended", "actions"), [(False, []), (True, ["reset an earlier join", "kubeadm join"])], ids=["valid", "ended"]
)
def test_a_worker_whose_certificate_has_ended_joins_again(
    monkeypatch: pytest.MonkeyPatch, ended: bool, actions: list[str]
) -> None:
    """Also while its node still exists: its kubelet cannot start any more. Its file alone does not decide it."""
    state = {"role": "worker", "ca_hash": "sha256:a", "server": "https://x", "ended": True}
    done: list[str] = []
    monkeypatch.setattr(facts, "kubernetes", lambda: state)
    monkeypatch.setattr(ledger, "load", lambda *_: ledger.Ledger(kubeadm="join done"))
    monkeypatch.setattr(ledger.Ledger, "save", lambda *_: None)
    monkeypatch.setattr(reset, "leftovers", lambda: ["/etc/kubernetes/kubelet.conf"])
    monkeypatch.setattr(reset, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(command, "begin", lambda *_, **__: None)
    monkeypatch.setattr(command, "end", lambda *_: None)
    monkeypatch.setattr(command, "run", lambda verb, *_: done.append(verb))
    report = join.join("10.0.0.1:6443", "a.b", "sha256:a", True, {}, 60, check=False, ended=ended)
    assert report.actions == actions
    assert done == (["reset", "join"] if ended else [])


@pytest.mark.parametrize(("ca", "progress"), [(None, ""), ("sha256:b", ""), ("sha256:a", ""), (None, "join started")])
def test_a_join_removes_nothing_of_another_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ca: str | None, progress: str
) -> None:
    """Without a kubelet.conf only the CA and the ledger tell whose files they are."""
    state = {"role": None, "ca_hash": ca, "server": None}
    done: list[str] = []
    monkeypatch.setattr(facts, "kubernetes", lambda: state)
    monkeypatch.setattr(kubeconfig, "KUBELET", str(tmp_path / "none"))
    monkeypatch.setattr(ledger, "load", lambda *_: ledger.Ledger(kubeadm=progress))
    monkeypatch.setattr(reset, "leftovers", lambda: ["/etc/kubernetes/admin.conf"])
    monkeypatch.setattr(reset, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(command, "begin", lambda *_, **__: None)
    monkeypatch.setattr(command, "end", lambda *_: None)
    monkeypatch.setattr(command, "run", lambda verb, *_: done.append(verb))
    if progress or ca == "sha256:a":
        join.join("10.0.0.1:6443", "a.b", "sha256:a", False, {}, 60, check=False)
        assert done == ["reset", "join"]
        return
    with pytest.raises(MachineProblem, match=r"admin\.conf exists, but gpunodes did not create it"):
        join.join("10.0.0.1:6443", "a.b", "sha256:a", False, {}, 60, check=True)
    assert done == []


def test_an_init_removes_nothing_of_another_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CA that its user made stays for kubeadm, which uses it."""
    done: list[str] = []
    for module, name in ((reset, "MANIFEST"), (reset, "ETCD"), (kubeconfig, "ADMIN"), (kubeconfig, "KUBELET")):
        monkeypatch.setattr(module, name, str(tmp_path / "none"))
    monkeypatch.setattr(facts, "kubernetes", lambda: {"ca_hash": None})
    monkeypatch.setattr(ledger, "load", lambda *_: ledger.Ledger())
    monkeypatch.setattr(reset, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(command, "begin", lambda *_, **__: None)
    monkeypatch.setattr(command, "end", lambda *_: None)
    monkeypatch.setattr(command, "run", lambda verb, *_: done.append(verb))
    monkeypatch.setattr(kube_api, "admin", lambda: Api({}))
    monkeypatch.setattr(reset, "leftovers", lambda control_plane: [kubeconfig.CA, facts.BOOTSTRAP])
    with pytest.raises(MachineProblem, match=r"bootstrap-kubelet\.conf exists, but gpunodes did not create it"):
        init.init([], {}, {}, 60, check=True)
    monkeypatch.setattr(reset, "leftovers", lambda control_plane: [kubeconfig.CA])
    init.init([], {}, {}, 60, check=False)
    assert done == ["init"]
