"""kubeadm upgrade on a machine: what decides what is done, what an interruption leaves, and what facts are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.ansible.module_utils import (
    containers,
    facts,
    kube_api,
    ledger,
    packages,
    process,
    upgrade_facts,
    upgrade_fetch,
)
from gpunodes.ansible.module_utils.cluster import upgraded
from gpunodes.ansible.module_utils.host import images, installation, services
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Service, Spec
from gpunodes.ansible.module_utils.kubeadm import command, compared, upgrade, versions
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from tests.unit.module_utils.test_converge import Packages

POD = """apiVersion: v1
kind: Pod
spec:
  containers:
  - command:
    - NAME
    - --profiling=false
    - --feature-gates=A=true,kube:B=false,wardle:C=true
    image: registry.k8s.io/NAME:vVERSION
"""


class Node:
    """A node whose kubeadm writes manifests and the cluster's version."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, role: str | None, configured: str) -> None:
        self.root, self.role, self.configured = root, role, configured
        self.installed = {"kubeadm": "1.36.3", "kubelet": "1.35.4"}
        self.runs: list[tuple[str, tuple[str, ...], Mapping[str, Any]]] = []
        self.dies = False
        (root / "manifests").mkdir()
        (root / "tmp").mkdir()
        (root / "config.yaml").write_text("")
        monkeypatch.setattr(ledger, "PATH", str(root / "ledger/ledger.json"))
        monkeypatch.setattr(versions, "MANIFESTS", str(root / "manifests"))
        monkeypatch.setattr(upgrade, "BACKUPS", str(root / "tmp"))
        monkeypatch.setattr(command, "KUBELET_CONFIG", str(root / "config.yaml"))
        monkeypatch.setattr(command, "run", self.run)
        monkeypatch.setattr(facts, "kubernetes", lambda: {"role": self.role})
        monkeypatch.setattr(versions, "program", self.installed.__getitem__)
        monkeypatch.setattr(versions, "configured", lambda _: self.configured)
        monkeypatch.setattr(kube_api, "admin", lambda *_: None)
        ledger.Ledger(kubeadm="init done").save()
        if role == "control_plane":
            self.write("1.35.4")

    def write(self, version: str, *names: str) -> None:
        for name in names or versions.COMPONENTS:
            text = POD.replace("NAME", name).replace("VERSION", version)
            (self.root / f"manifests/{name}.yaml").write_text(text)

    def run(
        self,
        verb: str,
        documents: list[dict[str, Any]],
        _: float,
        flags: tuple[str, ...],
        patches: Any,
        *,
        finishes: bool,
    ) -> None:
        assert finishes, "a control plane must not be left halfway because the controller has gone"
        assert ledger.load().upgrade == verb.split()[1], "the ledger comes first"
        self.runs.append((verb, flags, documents[0]))
        if self.dies:
            self.write("1.36.3", "kube-apiserver")
            raise KeyboardInterrupt
        if self.role == "control_plane":
            self.write("1.36.3")
            self.configured = "1.36.3"
        (self.root / "config.yaml").chmod(0o644)

    def upgrade(self, check: bool = False, target: str = "1.36.3") -> list[str]:
        return upgrade.upgrade(target, {"etcd0+strategic": {}}, {"upgradeManifests": "9m"}, 60, check).actions


def test_the_first_control_plane_applies_and_the_others_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "control_plane", "1.35.4")
    assert node.upgrade(check=True) == ["kubeadm upgrade apply"]
    assert node.runs == []
    assert ledger.load().upgrade == ""
    node.upgrade()
    verb, flags, document = node.runs[0]
    assert (verb, flags) == ("upgrade apply", ("--yes",))
    assert document["apply"] == {
        "kubernetesVersion": "v1.36.3",
        "imagePullSerial": False,
        "patches": {"directory": "/run/gpunodes/patches"},
    }
    assert document["timeouts"] == {"upgradeManifests": "9m"}
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert (ledger.load().upgrade, ledger.load().kubelet_before) == ("", "1.35.4")
    assert node.upgrade() == []
    # Another one of the same cluster.
    node.write("1.35.4")
    assert node.upgrade() == ["kubeadm upgrade node"]
    assert node.runs[1][:2] == ("upgrade node", ())


def test_a_killed_upgrade_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "control_plane", "1.35.4")
    node.dies = True
    with pytest.raises(KeyboardInterrupt):
        node.upgrade()
    # kubeadm has uploaded the version, but not yet replaced the add-ons, and has moved a manifest away.
    node.dies, node.configured = False, "1.36.3"
    backup = tmp_path / "tmp/kubeadm-backup-manifests-1"
    backup.mkdir()
    (tmp_path / "manifests/kube-scheduler.yaml").rename(backup / "kube-scheduler.yaml")
    assert node.upgrade() == [f"restore {tmp_path}/manifests/kube-scheduler.yaml", "kubeadm upgrade apply"]
    assert ledger.load().upgrade == ""
    assert node.upgrade() == []


def test_a_manifest_that_someone_else_removed_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "control_plane", "1.35.4")
    (tmp_path / "tmp/kubeadm-backup-manifests-1").mkdir()
    (tmp_path / "manifests/kube-scheduler.yaml").rename(tmp_path / "tmp/kubeadm-backup-manifests-1/kube-scheduler.yaml")
    assert node.upgrade(check=True) == ["kubeadm upgrade apply"]


def test_one_copy_of_etcd_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "control_plane", "1.35.4")
    for number in (1, 2, 3):
        path = tmp_path / f"tmp/kubeadm-backup-etcd-{number}"
        path.mkdir()
        os.utime(path, (number, number))
    node.upgrade()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["kubeadm-backup-etcd-3"]


def test_a_worker_is_complete_when_its_kubelet_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "worker", "")
    assert node.upgrade() == ["kubeadm upgrade node"]
    assert "patches" not in node.runs[0][2]["node"]
    assert node.upgrade() == ["kubeadm upgrade node"], "until its kubelet is replaced, nothing shows that it was done"
    node.installed["kubelet"] = "1.36.3"
    assert node.upgrade() == []
    assert ledger.load().kubelet_before == "1.35.4"


@pytest.mark.parametrize(
    ("role", "kubeadm", "target", "words"),
    [
        (None, "1.36.3", "1.36.3", "is not a node"),
        ("worker", "1.35.4", "1.36.3", "kubeadm 1.35.4 is installed"),
        ("worker", "1.36.3", "1.34.1", "a downgrade is not possible"),
        ("control_plane", "1.36.3", "1.34.1", "a downgrade is not possible"),
        ("control_plane", "1.37.2", "1.37.2", "its control plane is v1.35.4; wanted: 1.36: kubeadm upgrades"),
    ],
)
def test_what_is_refused_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str | None,
    kubeadm: str,
    target: str,
    words: str,
) -> None:
    node = Node(tmp_path, monkeypatch, role, "1.35.4")
    node.installed["kubeadm"] = kubeadm
    with pytest.raises(MachineProblem, match=words):
        node.upgrade(target=target)
    assert (node.runs, ledger.load().upgrade) == ([], "")


def test_a_control_plane_skips_no_minor_when_another_one_has_raised_that_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubeadm upgrade node` does not look; a component that an interruption left behind counts, too."""
    node = Node(tmp_path, monkeypatch, "control_plane", "1.37.2")
    node.installed["kubeadm"] = "1.37.2"
    node.write("1.36.3", "kube-apiserver")
    with pytest.raises(MachineProblem, match=r"upgrade it to 1\.36 first"):
        node.upgrade(target="1.37.2")
    assert node.runs == []


def test_a_node_that_others_made_is_upgraded_and_stays_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset must go on refusing it: its ledger does not say that gpunodes joined it."""
    node = Node(tmp_path, monkeypatch, "control_plane", "1.35.4")
    Path(ledger.PATH).unlink()
    assert node.upgrade() == ["kubeadm upgrade apply"]
    found = ledger.load()
    assert (found.kubeadm, found.upgrade, found.kubelet_before) == ("", "", "1.35.4")
    assert node.upgrade() == []


def test_programs_that_no_package_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their paths: /usr/local/bin comes before the packages' /usr/bin."""
    places = {"kubelet": "/usr/bin/kubelet", "kubeadm": "/usr/bin/kubeadm"}
    monkeypatch.setattr(shutil, "which", lambda name, path: places.get(name))
    assert upgrade_facts._unpackaged() == []
    del places["kubeadm"]
    assert upgrade_facts._unpackaged() == []
    places |= {"kubeadm": "/usr/local/bin/kubeadm", "kubelet": "/usr/local/bin/kubelet"}
    assert upgrade_facts._unpackaged() == ["kubeadm", "kubelet"]
    del places["kubelet"]
    assert upgrade_facts._unpackaged() == ["kubeadm", "kubelet"]


def test_versions_in_manifests_and_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Node(tmp_path, monkeypatch, "control_plane", "")
    assert versions.images() == dict.fromkeys(versions.COMPONENTS, "v1.35.4")
    found = versions.arguments(versions.manifest("kube-apiserver") or "")
    assert sorted(found) == ["feature-gates", "profiling"]
    assert upgrade_facts.gates_of(found["feature-gates"]) == {"A": True, "B": False}
    assert upgrade_facts.kubelet_arguments('KUBELET_KUBEADM_ARGS="--node-ip=10.0.0.2 --containerd=x"\n') == [
        "containerd",
        "node-ip",
    ]
    extra = "KUBELET_EXTRA_ARGS=--containerd=x --feature-gates=A=true,B=false\n"
    assert upgrade_facts.kubelet_arguments(extra) == ["containerd", "feature-gates"]
    assert upgrade_facts.argument_gates(extra) == {"A": True, "B": False}
    config = 'cgroupDriver: systemd\nfeatureGates:\n  A: true\n  "B": false\nkind: KubeletConfiguration\n  C: true\n'
    assert upgrade_facts.kubelet_gates(config) == {"A": True, "B": False}
    assert upgrade_facts.kubelet_gates("featureGates: {}\nx:\n  A: true\n") == {}
    arguments = "  - name: feature-gates\n    value: A=true\n  - name: profiling\n    value: x=false\n"
    text = f"apiServer:\n  extraArgs:\n{arguments}"
    assert upgrade_facts.configured_gates({"data": {"ClusterConfiguration": text}}) == {"A": True}


@pytest.mark.parametrize(
    "text",
    [
        "kind: x\nfeatureGates:  # of 2024\n  # an old one\n\n  A: true # C: true\n  B:  False\nx:\n  C: true\n",
        'featureGates: {A: true, "B": no}\nother: {C: true}\n',
        "featureGates: {\n  A: true,\n  'B': off\n}\nC: true\n",
        '{"kind": "KubeletConfiguration", "featureGates": {"A": true, "B": false, "C": "x", "$(id)": true}}\n',
        '"featureGates":\n\t"A": on\n\t"B": FALSE\n',
    ],
)
def test_feature_gates_in_files_that_people_write(text: str) -> None:
    assert upgrade_facts.kubelet_gates(text) == {"A": True, "B": False}


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '{"featureGates": 7}', "featureGates:", "# featureGates:\n  A: true"]
)
def test_files_without_feature_gates(text: str) -> None:
    assert upgrade_facts.kubelet_gates(text) == {}


def test_the_gates_of_a_kubelet_are_those_that_it_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its --config-dir may have gates that the next minor removes: then the new kubelet does not start."""
    kubelet, folder = tmp_path / "kubelet", tmp_path / "conf.d"
    kubelet.mkdir()
    (folder / "more").mkdir(parents=True)
    (kubelet / "config.yaml").write_text("featureGates:\n  A: true\n  B: true\n")
    (folder / "20-ours.conf").write_text("featureGates:\n  B: false\n  C: true\n")
    (folder / "more/30.conf").write_text('{"featureGates": {"D": true}}')
    (folder / "40.yaml").write_text("featureGates:\n  E: true\n")
    # That of gpunodes is written anew before the kubelet starts.
    (folder / "10-feature-gates.conf").write_text('{"featureGates": {"F": true}}')
    own = {str(folder / "10-feature-gates.conf"): ledger.OldFile(None)}
    unit = (
        "# /etc/systemd/system/kubelet.service\n# --config-dir=/nowhere\n[Service]\n"
        f'Environment="KUBELET_CONFIG_ARGS=--config=x --config-dir={folder}"\n'
        "ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS --feature-gates=G=true\n"
    )
    monkeypatch.setattr(upgrade_facts, "_KUBELET", str(kubelet))
    monkeypatch.setattr(upgrade_facts, "_ENVIRONMENTS", ())
    monkeypatch.setattr(process, "run", lambda argv, *_: CommandResult(argv, 0, unit, ""))
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    ledger.Ledger(files=own).save()
    monkeypatch.setattr(versions, "program", lambda _: "1.36.3")
    found = upgrade_facts.read(upgrade_facts.Sources(), False, {}, {})
    assert found["kubelet_gates"] == {"A": True, "B": False, "C": True, "D": True, "G": True}
    assert found["kubelet_arguments"] == ["config", "config-dir", "feature-gates"]


def test_deprecated_apis_and_nothing_else_of_the_metrics() -> None:
    name = "apiserver_requested_deprecated_apis"
    metrics = (
        f"# HELP {name} Gauge\n"
        f'{name}{{group="flowcontrol.apiserver.k8s.io",removed_release="1.37",resource="flowschemas",'
        'subresource="",version="v1beta3"} 1\n'
        f'{name}{{group="",removed_release="",resource="componentstatuses",subresource="",version="v1"}} 1\n'
        f'{name}{{group="a",removed_release="1.37",resource="b; reboot",subresource="",version="v1"}} 1\n'
        'other{removed_release="1.37"} 1\n'
    )
    assert upgrade_facts.deprecated(metrics) == [
        {"api": "flowcontrol.apiserver.k8s.io/v1beta3 flowschemas", "removed": "1.37"}
    ]


def test_every_control_plane_reads_its_own_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric belongs to a process: another server does not know what this one was asked."""
    text = 'apiserver_requested_deprecated_apis{group="a",removed_release="1.37",resource="b",version="v1"} 1\n'
    monkeypatch.setattr(compared, "own_client", lambda _: SimpleNamespace(get=lambda _: {"message": text}))
    monkeypatch.setattr(compared, "is_control_plane", lambda: False)
    assert upgrade_facts._requested() == {"deprecated": [], "metrics_unread": ""}
    monkeypatch.setattr(compared, "is_control_plane", lambda: True)
    assert upgrade_facts._requested()["deprecated"] == [{"api": "a/v1 b", "removed": "1.37"}]

    def refused(_: float) -> Any:
        raise MachineProblem("it does not respond")

    monkeypatch.setattr(compared, "own_client", refused)
    assert upgrade_facts._requested() == {"deprecated": [], "metrics_unread": "it does not respond"}


def test_versions_in_package_sources() -> None:
    apt = "".join(
        f"Package: {name}\nVersion: {version}\nDescription: x\n\n"
        for name, version in (("kubelet", "1.36.1-1.1"), ("kubelet", "1.36.10-1.1"), ("cri-tools", "1.36.0-1.1"))
    )
    assert upgrade_facts.parse_packages(apt + "Package: kubelet\nVersion: $(reboot)\n") == {
        "kubelet": ["1.36.10", "1.36.1"]
    }
    rpm = (
        '<package type="rpm"><name>kubeadm</name><arch>x86_64</arch>'
        '<version epoch="0" ver="1.36.3" rel="150500.1.1"/></package>'
    )
    assert upgrade_facts.parse_primary(rpm) == {"kubeadm": ["1.36.3"]}


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """A machine with Kubernetes 1.35.4, held, whose source has 1.36.3 and 1.35.4."""
    found = Packages()
    found.there = {name: packages.PackageState("1.35.4-1.1", held=True) for name in ("kubelet", "kubeadm")}
    monkeypatch.setattr(found, "available", lambda names: {name: ["1.36.3-1.1", "1.35.4-1.1"] for name in names})
    monkeypatch.setattr(packages, "detect", lambda: found)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(services, "states", lambda names: {name: {"enabled": True, "active": True} for name in names})
    monkeypatch.setattr(services, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    monkeypatch.setattr(installation, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    return found


def spec(version: str, *, replace: bool = True) -> Spec:
    names = ("kubelet", "kubeadm")
    return Spec(
        packages=tuple(RequestedPackage(name, f"{version}-*", hold=True, replace=replace) for name in names),
        services=(Service("kubelet"),),
    )


def test_replaced_packages_are_held_again_and_their_service_restarts(manager: Packages) -> None:
    changes = converge(spec("1.36.3"))
    assert {name: state for name, state in manager.there.items() if name != "runc"} == {
        name: packages.PackageState("1.36.3-1.1", held=True) for name in ("kubelet", "kubeadm")
    }
    assert "restart kubelet" in changes.actions
    assert any(
        each.before.get("kubelet") == "1.35.4-1.1" for each in changes.differences if isinstance(each.before, dict)
    )
    assert converge(spec("1.36.3")).actions == []
    # And back: an older kubelet is allowed.
    assert "restart kubelet" in converge(spec("1.35.4")).actions
    assert manager.there["kubelet"] == packages.PackageState("1.35.4-1.1", held=True)


def test_other_packages_are_never_replaced(manager: Packages) -> None:
    with pytest.raises(MachineProblem, match="does not upgrade or downgrade"):
        converge(spec("1.36.3", replace=False))
    assert manager.there["kubelet"].version == "1.35.4-1.1"


def test_check_mode_shows_what_would_be_replaced(manager: Packages) -> None:
    changes = converge(spec("1.36.3"), check=True)
    assert manager.calls == []
    found = next(each for each in changes.differences if each.title == "packages")
    assert found.before == {"kubelet": "1.35.4-1.1", "kubeadm": "1.35.4-1.1"}


def test_apt_replaces_held_packages_only_if_asked_to() -> None:
    wanted = {"kubelet": "1.36.3-1.1"}
    assert packages.Apt._versions(wanted, replace=False) == ["kubelet=1.36.3-1.1"]
    assert packages.Apt._versions(wanted, replace=True) == [
        "--allow-change-held-packages",
        "--allow-downgrades",
        "kubelet=1.36.3-1.1",
    ]
    assert packages.Dnf._install(wanted, replace=True)[0] == "--disableplugin=versionlock"
    assert packages.Dnf._install(wanted, replace=False) == ["install", "kubelet-1.36.3-1.1"]


def test_fetching_installs_and_restarts_nothing(manager: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    present: set[str] = set()

    def pull(name: str, _: float) -> CommandResult:
        if "missing" not in name:
            present.add(name)
        return CommandResult([], 0 if "missing" not in name else 1, "", "not found")

    monkeypatch.setattr(images, "lister", lambda: present.__contains__)
    monkeypatch.setattr(images, "pull", pull)
    before = dict(manager.there)
    assert upgrade_fetch.fetch(spec("1.36.3"), ["a:1"], 60, check=True).actions == [
        "download kubelet, kubeadm",
        "pull a:1",
    ]
    assert manager.calls == []
    assert upgrade_fetch.fetch(spec("1.36.3"), ["a:1"], 60, check=False).actions == [
        "download kubelet, kubeadm",
        "pull a:1",
    ]
    assert upgrade_fetch.fetch(spec("1.36.3"), ["a:1"], 60, check=False).actions == []
    assert manager.there == before
    assert ledger.load().restarts == []
    with pytest.raises(MachineProblem, match="the image missing:1 cannot be pulled"):
        upgrade_fetch.fetch(spec("1.36.3"), ["missing:1"], 60, check=False)
    manager.removes = ["docker.io"]
    with pytest.raises(MachineProblem, match=r"would remove docker\.io"):
        upgrade_fetch.fetch(Spec(packages=(RequestedPackage("kubectl", "1.36.*", replace=True),)), [], 60, check=False)


def test_an_image_comes_by_a_mirror_that_only_the_runtime_knows(
    manager: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark of the pull that failed is removed: the image would count as interrupted."""
    del manager
    present: set[str] = set()
    asked: list[Sequence[str]] = []

    def crictl(argv: Sequence[str], _: float) -> CommandResult:
        asked.append(argv)
        present.add(argv[1])
        return CommandResult(argv, 0, "", "")

    monkeypatch.setattr(images, "_FETCHES", str(tmp_path))
    mark = Path(images._mark("registry.k8s.io/a:1"))
    mark.write_text("boot")
    monkeypatch.setattr(images, "lister", lambda: lambda name: name in present and not mark.exists())
    monkeypatch.setattr(images, "pull", lambda name, _: CommandResult([name], 1, "", "no route to host"))
    monkeypatch.setattr(images, "run", lambda argv: CommandResult(argv, 0, "", ""))
    monkeypatch.setattr(containers, "crictl", crictl)
    upgrade_fetch.fetch(Spec(), ["registry.k8s.io/a:1"], 60, check=False)
    assert asked == [["pull", "registry.k8s.io/a:1"]]
    assert not mark.exists()


class Api:
    """A node and its pods; the Lease is renewed at each look."""

    def __init__(
        self,
        version: str,
        tag: str = "v1.36.3",
        ready: str = "True",
        renews: bool = True,
        failing: str = "",
        **spec: str,
    ) -> None:
        self.version, self.tag, self.ready, self.renews, self.count = version, tag, ready, renews, 0
        daemon = {"name": "daemon-x", "namespace": failing, "ownerReferences": [{"kind": "DaemonSet"}]}
        self.daemons = [{"metadata": daemon, "spec": spec, "status": {"phase": "Pending"}}] if failing else []

    def find(self, path: str) -> Any:
        if "/leases/" in path:
            self.count += self.renews
            return {"spec": {"renewTime": f"t{self.count}"}}
        conditions = [{"type": "Ready", "status": "True"}]
        return {"status": {"nodeInfo": {"kubeletVersion": f"v{self.version}"}, "conditions": conditions}}

    def get(self, _: str, **__: str) -> Any:
        names = [f"{name}-cp-1" for name in (*versions.COMPONENTS, versions.ETCD)]
        return {
            "items": [
                {
                    "metadata": {"name": name, "namespace": "kube-system", "ownerReferences": [{"kind": "Node"}]},
                    "spec": {"containers": [{"image": f"registry.k8s.io/x:{self.tag}"}]},
                    "status": {
                        "phase": "Running",
                        "conditions": [{"type": "Ready", "status": self.ready if name.startswith("etcd") else "True"}],
                    },
                }
                for name in names
            ]
            + self.daemons
        }


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (Api("1.36.3"), ""),
        (Api("1.35.4"), "its kubelet is v1.35.4"),
        (Api("1.36.3", tag="v1.35.4"), "its kube-apiserver is v1.35.4"),
        (Api("1.36.3", ready="False"), "pod etcd-cp-1"),
        (Api("1.36.3", renews=False), "has not renewed"),
        (Api("1.36.3", failing="kube-system"), "pod daemon-x is pending"),
        (Api("1.36.3", failing="kube-flannel", priorityClassName="system-node-critical"), "pod daemon-x is pending"),
        (Api("1.36.3", failing="team"), ""),
    ],
)
def test_a_node_is_verified(api: Api, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "admin", lambda: api)
    monkeypatch.setattr(upgraded, "_POLL_S", 0.001)
    if not words:
        upgraded.wait("cp-1", "1.36.3", "1.36.3", 5)
        return
    with pytest.raises(MachineProblem, match=words):
        upgraded.wait("cp-1", "1.36.3", "1.36.3", 0.02)


def test_a_node_that_returns_is_verified_without_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails on its own would keep the node from its owner for ever."""
    monkeypatch.setattr(upgraded, "_POLL_S", 0.001)
    monkeypatch.setattr(kube_api, "admin", lambda: Api("1.36.3", failing="kube-system"))
    upgraded.wait("cp-1", "1.36.3", "", 5, daemons=False)
    monkeypatch.setattr(kube_api, "admin", lambda: Api("1.35.4"))
    with pytest.raises(MachineProblem, match=r"its kubelet is v1.35.4"):
        upgraded.wait("cp-1", "1.36.3", "", 0.02, daemons=False)
