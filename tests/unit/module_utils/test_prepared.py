"""What completes a machine that joins later, and services and drivers that stay off. No program is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import docker_images, gpu_facts, ledger, lock, packages, prepared, undo
from gpunodes.ansible.module_utils.host import gpu_driver, images, services
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Driver, Service, Spec
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from tests.unit.module_utils.test_converge import Packages

PAUSE, PROXY = "registry.k8s.io/pause:3.10", "registry.k8s.io/kube-proxy:v{kubelet}"


class Runtime:
    """containerd and Docker with some images; their pulls may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: set[str] = set()
        self.broken = ""
        self.background: list[bool] = []
        self.calls: list[str] = []
        monkeypatch.setattr(images, "fetching", lambda: self.background.pop() if self.background else False)
        monkeypatch.setattr(images, "lister", lambda: self.images.__contains__)
        monkeypatch.setattr(images, "pull", lambda name, _: self.pull(name))
        monkeypatch.setattr(docker_images, "present", self.images.__contains__)
        monkeypatch.setattr(docker_images, "kubeadm_images", lambda _: ["registry.k8s.io/coredns:1"])
        monkeypatch.setattr(prepared, "run", lambda argv, _: self.pull(argv[-1]))

    def pull(self, name: str) -> CommandResult:
        self.calls.append(name)
        if not self.broken:
            self.images.add(name)
        return CommandResult([], 1 if self.broken else 0, "", self.broken)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runtime:
    manager = Packages()
    manager.there["kubelet"] = packages.PackageState("1.36.3-1.1", held=True)
    monkeypatch.setattr(packages, "detect", lambda: manager)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
    monkeypatch.setattr(prepared, "IDS", {})
    return Runtime(monkeypatch)


def complete(names: list[str], runtime: str = "containerd", check: bool = False, limit_s: float = 9) -> list[str]:
    return prepared.complete(names, runtime, False, limit_s, check, pause_s=0).actions


def test_images_are_awaited_and_the_missing_ones_pulled(runtime: Runtime) -> None:
    runtime.background = [True, True]
    runtime.images.add(PAUSE)
    assert complete([PAUSE, PROXY]) == ["pull registry.k8s.io/kube-proxy:v1.36.3"]
    assert runtime.background == []
    assert complete([PAUSE, PROXY]) == []


def test_a_pull_that_does_not_end_is_a_problem(runtime: Runtime) -> None:
    runtime.background = [True] * 3
    with pytest.raises(MachineProblem, match="has not pulled its images in 0 s"):
        complete([PAUSE], limit_s=0)


def test_an_image_that_cannot_be_pulled_is_a_problem(runtime: Runtime) -> None:
    runtime.broken = "ctr: it broke"
    with pytest.raises(MachineProblem, match=r"pause:3\.10 cannot be pulled: ctr: it broke; wanted: all images"):
        complete([PAUSE])


@pytest.mark.parametrize("program", ["containerd", "docker"])
def test_a_failed_pull_shows_its_first_cause_with_a_remedy(runtime: Runtime, program: str) -> None:
    runtime.broken = (
        "ctr: failed to resolve reference: dial tcp: lookup registry.k8s.io on 10.0.0.1:53: no such host\n"
        "ctr: the command ended\n"
    )
    with pytest.raises(MachineProblem) as raised:
        complete([PAUSE], program)
    problem = raised.value.problem
    assert problem.found.endswith("cannot be pulled: lookup registry.k8s.io on 10.0.0.1:53: no such host")
    assert "DNS" in problem.remedy
    assert raised.value.output == runtime.broken


def test_docker_also_gets_the_images_that_kubeadm_lists(runtime: Runtime) -> None:
    assert complete([PAUSE], "docker") == [f"pull {PAUSE}", "pull registry.k8s.io/coredns:1"]
    assert runtime.calls == [PAUSE, "registry.k8s.io/coredns:1"]
    assert complete([PAUSE], "docker") == []


def test_check_mode_neither_waits_nor_pulls_nor_needs_a_kubelet(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "detect", Packages)
    runtime.background = [True]
    assert complete([PAUSE, PROXY], check=True) == [f"pull {PAUSE}"]
    assert (runtime.background, runtime.calls) == ([True], [])


def test_only_runtimes_of_gpunodes_lose_their_ids(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A runtime that was there before belongs to somebody else."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "id").write_text("x")
    monkeypatch.setattr(prepared, "IDS", {str(tmp_path / name): "id" for name in ("ours", "theirs")})
    ledger.Ledger(directories=[str(tmp_path / "ours")]).save()
    assert complete([], check=True) == [f"remove {tmp_path}/ours/id"]
    assert (tmp_path / "ours" / "id").exists()
    assert complete([]) == [f"remove {tmp_path}/ours/id"]
    assert not (tmp_path / "ours" / "id").exists()
    assert (tmp_path / "theirs" / "id").exists()
    assert complete([]) == []
    assert runtime.calls == []


def test_an_image_counts_when_its_pull_was_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "_FETCHES", str(tmp_path))

    def run(argv: Sequence[str], *_: float, environment: Mapping[str, str]) -> CommandResult:
        # Without it ctr gives the machine an id.
        assert environment == {"CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS": "true"}
        return CommandResult(list(argv), 0, "a/b:1\na/c:1\n", "")

    monkeypatch.setattr(images, "run", run)
    (tmp_path / "a_c:1").write_text("this boot")
    assert [name for name in ("a/b:1", "a/c:1", "a/d:1") if images.lister()(name)] == ["a/b:1"]


class Systemd:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.state = {"enabled": True, "active": True}
        self.calls: list[str] = []
        monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
        monkeypatch.setattr(services, "states", lambda names: {name: dict(self.state) for name in names})
        monkeypatch.setattr(services, "run", self.run)
        monkeypatch.setattr(services, "must", self.run)

    def run(self, argv: list[str], *_: Any) -> CommandResult:
        self.calls.append(argv[1])
        self.state.update(
            {"stop": {"active": False}, "disable": {"enabled": False}, "enable": {"enabled": True}}.get(argv[1], {})
        )
        return CommandResult(argv, 0, "", "")


OFF = Spec(services=(Service("kubelet", off=True),))


def test_a_service_that_is_to_be_off_is_stopped_and_disabled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Debian's package of the kubelet starts it; a later join enables it; the ledger keeps the first state."""
    systemd = Systemd(monkeypatch, tmp_path)
    first = {"kubelet": {"enabled": False, "active": False}}
    ledger.Ledger(services=dict(first)).save()
    assert converge(OFF, check=True).actions == ["stop kubelet", "disable kubelet"]
    assert systemd.calls == []
    assert converge(OFF).actions == ["stop kubelet", "disable kubelet"]
    assert systemd.state == {"enabled": False, "active": False}
    assert converge(OFF).actions == []
    joins = Spec(services=(Service("kubelet", when_exists=str(tmp_path / "none")),))
    assert converge(joins).actions == ["enable kubelet"]
    assert ledger.load().services == first


def test_a_service_that_was_on_before_gpunodes_stays_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    systemd = Systemd(monkeypatch, tmp_path)
    assert converge(OFF).actions == []
    assert systemd.state == {"enabled": True, "active": True}


def test_a_driver_without_a_gpu_is_built_and_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ledger has its modules: the boot of a copy loads them, and a reset there must unload them."""
    calls: list[str] = []
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
    monkeypatch.setattr(gpu_driver, "_loaded", lambda _: False)
    monkeypatch.setattr(gpu_driver, "_version", lambda *_: "" if not calls else "580.1")
    monkeypatch.setattr(gpu_driver, "_build", lambda *_: calls.append("build"))
    monkeypatch.setattr(gpu_driver, "_load", lambda _: pytest.fail("a module was loaded"))
    wanted = Spec(section="gpu", driver=Driver(("nvidia", "nvidia-uvm"), loaded=False))
    converge(wanted)
    assert calls == ["build"]
    assert converge(wanted).actions == []
    assert ledger.load(ledger.path_of("gpu")).modules == ["nvidia", "nvidia-uvm"]


def test_expected_gpus_are_reported_by_a_machine_without_gpus_only(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert gpu_facts.read(root) == {"functions": [], "nvswitches": 0}
    found = gpu_facts.read(root, ["2330"])
    assert (found["functions"], found["expected"]) == ([], ["2330"])
    assert {"nouveau", "headers", "driver", "secure_boot"} <= set(found)
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    for name, value in {"vendor": "0x10de", "class": "0x030200", "device": "0x20b0"}.items():
        (device / name).write_text(value)
    assert "expected" not in gpu_facts.read(root, ["2330"])


def test_a_reset_after_a_preparation_leaves_no_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also on a copy of the disk: nothing in the ledger names the machine."""
    Systemd(monkeypatch, tmp_path)
    monkeypatch.setattr(lock, "PATH", str(tmp_path / "lock"))
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(undo, "run", lambda argv, *_: CommandResult(argv, 0, "", ""))
    ledger.Ledger(services={"kubelet": {"enabled": False, "active": False}}).save()
    converge(OFF)
    machine_id = Path("/etc/machine-id")
    if machine_id.exists() and (own := machine_id.read_text().strip()):
        assert own not in Path(ledger.PATH).read_text()
    undo.Undoer().run()
    assert not Path(ledger.PATH).exists()
