"""MIG: the setting and its label, the plan, the program that makes instances, and the plugin. nvidia-smi is a stand-in.

The stand-in prints what NVIDIA's guide shows, and was never compared with a real GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import settings
from gpunodes.ansible.filter import general
from gpunodes.ansible.filter import gpu as filters
from gpunodes.ansible.module_utils import devices, gpu_mig, gpu_verify, ledger, mig
from gpunodes.ansible.module_utils.host import gpu_driver, services
from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.ansible.module_utils.problem import MachineProblem, Problem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu, gpu_sharing, pools, tables
from gpunodes.planner import gpu_mig as planner
from gpunodes.views import gpu as view

from tests.unit.planner.test_gpu_plan import machine
from tests.unit.test_gpu_sharing import rendered

SEVEN = {"mode": "mig", "profiles": {"1g.10gb": 7}}
MIXED = {"mode": "mig", "profiles": {"1g.10gb": 2, "3g.40gb": 1, "2g.20gb": 1}}
LAYOUT = {"1g.10gb": 7}


@dataclass
class Board:
    """Two GPUs and the programs by which they are sliced."""

    capabilities: Path
    modes: list[str] = field(default_factory=lambda: ["Disabled", "Disabled"])
    pending: list[str] = field(default_factory=lambda: ["Disabled", "Disabled"])
    instances: list[list[str]] = field(default_factory=lambda: [[], []])
    resets: bool = True
    """Whether nvidia-smi can reset a GPU to change its mode."""
    active: set[str] = field(default_factory=lambda: {"nvidia-dcgm"})
    calls: list[str] = field(default_factory=list)
    broken: str = ""

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        words = list(argv)
        self.calls.append(" ".join(words))
        if self.broken and self.broken in self.calls[-1]:
            return 6, "some output\nUnable to do that: In use by another client\n"
        if words[0] == "systemctl":
            return (0 if words[-1] in self.active else 3), ""
        if words[:2] == ["nvidia-smi", "-q"]:
            return 0, self.xml()
        if words == ["nvidia-smi", "-L"]:
            return 0, self.listing()
        if words[0] == "nvidia-smi":
            self.change(words)
        return 0, ""

    def change(self, words: list[str]) -> None:
        number = int(words[words.index("-i") + 1].removeprefix("GPU-"))
        if "-mig" in words:
            self.pending[number] = "Enabled" if words[-1] == "1" else "Disabled"
            if self.resets:
                self.modes[number] = self.pending[number]
        if "-dgi" in words:
            self.instances[number] = []
        if "-cgi" in words:
            assert self.modes[number] == "Enabled"
            self.instances[number] = words[words.index("-cgi") + 1].split(",")
        folder = self.capabilities / f"gpu{number}" / "mig"
        for count in range(8):
            path = folder / f"gi{count}"
            if count < len(self.instances[number]):
                (path / "ci0").mkdir(parents=True, exist_ok=True)
                (path / "access").touch()
                (path / "ci0/access").touch()
            elif path.exists():
                subprocess.run(["rm", "-r", str(path)], check=True)

    def xml(self) -> str:
        return "<nvidia_smi_log>" + "".join(
            f"<gpu><uuid>GPU-{each}</uuid><minor_number>{each}</minor_number><mig_mode><current_mig>{self.modes[each]}"
            f"</current_mig><pending_mig>{self.pending[each]}</pending_mig></mig_mode></gpu>"
            for each in range(2)
        ) + "</nvidia_smi_log>"  # fmt: skip

    def listing(self) -> str:
        lines = []
        for each in range(2):
            lines.append(f"GPU {each}: NVIDIA H100 80GB HBM3 (UUID: GPU-{each})")
            lines += [
                f"  MIG {profile}     Device  {number}: (UUID: MIG-{each}-{number})"
                for number, profile in enumerate(self.instances[each])
            ]
        return "\n".join(lines) + "\n"

    def changes(self) -> list[str]:
        return [each for each in self.calls if each.startswith("nvidia-smi ") and " -i " in each]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board(tmp_path / "capabilities")
    monkeypatch.setattr(mig, "CAPABILITIES", str(made.capabilities))
    monkeypatch.setattr(mig, "STOPPED", str(tmp_path / "stopped"))
    monkeypatch.setattr(mig, "describe_devices", lambda run: run(["nvidia-ctk", "cdi", "generate"]))
    monkeypatch.setattr(gpu_mig, "_run", made.run)
    monkeypatch.setattr(gpu_mig, "UNIT", str(tmp_path / "gpunodes-mig.service"))
    monkeypatch.setattr(gpu_mig, "PROGRAM", str(tmp_path / "gpu-mig"))
    monkeypatch.setattr(gpu_mig, "REMOVED", Spec(section="gpu", absent=(gpu_mig.UNIT, gpu_mig.PROGRAM)))
    monkeypatch.setattr(gpu_mig, "_RELEASE_S", 0)
    monkeypatch.setattr(gpu_driver, "SYS", str(tmp_path / "sys"))
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    monkeypatch.setattr(gpu_driver, "holders", lambda _: [])
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))

    def program(argv: Sequence[str], *_: object, **__: object) -> CommandResult:
        made.calls.append(" ".join(argv))
        return CommandResult(argv, 0, "", "")

    monkeypatch.setattr(gpu_mig, "run_program", program)
    monkeypatch.setattr(services, "run", program)
    monkeypatch.setattr(services, "must", program)
    enabled = {"gpunodes-mig": {"enabled": True, "active": False}}
    monkeypatch.setattr(services, "states", lambda _: enabled if "systemctl enable gpunodes-mig" in made.calls else {})
    return made


def spec(tmp_path: Path, sharing: str = "mig-1g.10gb-7") -> Spec:
    """The unit of the plan, in a folder of the test."""
    made = planner.spec("gpu", sharing, "program")
    files = tuple(type(each)(str(tmp_path / Path(each.path).name), each.content, each.mode) for each in made.files)
    return Spec(section="gpu", files=files, services=made.services)


# --- the setting ---


@pytest.mark.parametrize(
    ("value", "label", "resources"),
    [
        (SEVEN, "mig-1g.10gb-7", {"nvidia.com/gpu": 14}),
        (
            MIXED,
            "mig-3g.40gb-1-2g.20gb-1-1g.10gb-2",
            {"nvidia.com/mig-3g.40gb": 2, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-1g.10gb": 4},
        ),
    ],
)
def test_the_label_and_the_resources_follow_from_the_setting(
    value: dict[str, Any], label: str, resources: dict[str, int]
) -> None:
    given = settings.resolve({"gpunodes_gpu_sharing": value})
    assert not list(settings.problems({"gpunodes_gpu_sharing": value}))
    assert pools.labels(given, []) == {devices.SHARING: label}
    assert gpu_sharing.setting_of(label) == value
    assert devices.layout(label) == value["profiles"]
    assert devices.offered(label, 2) == resources
    assert devices.replicas({devices.SHARING: label}) == sum(value["profiles"].values())
    assert filters.gpus_offered(2, value) == sum(resources.values())


@pytest.mark.parametrize(
    "value",
    [
        {"mode": "mig"},
        {"mode": "mig", "profiles": {}},
        {"mode": "mig", "profiles": ["1g.10gb"]},
        {"mode": "mig", "profiles": {"1g.10gb": 8}},
        {"mode": "mig", "profiles": {"1g.10gb": 0}},
        {"mode": "mig", "profiles": {"1g.10gb": True}},
        {"mode": "mig", "profiles": {"1g.10gb": "7"}},
        {"mode": "mig", "profiles": {"1g.10gb+me": 1}},
        {"mode": "mig", "profiles": {"all; reboot": 1}},
        {**SEVEN, "replicas": 2},
    ],
)
def test_values_that_are_refused(value: dict[str, Any]) -> None:
    assert [each.wanted for each in settings.problems({"gpunodes_gpu_sharing": value})] == [devices.SHARING_WANTED]


@pytest.mark.parametrize("label", ["mig", "mig-", "mig-1g.10gb", "mig-1g.10gb-8", "mig-1g.10gb-1;", "mig-1g.10gb-1\n"])
def test_a_label_that_gpunodes_did_not_set_is_no_layout(label: str) -> None:
    assert devices.layout(label) == {}
    assert devices.replicas({devices.SHARING: label}) == 1


def test_a_burn_in_needs_whole_gpus() -> None:
    with pytest.raises(WrongInput, match="gpunodes_burn_in tests whole GPUs"):
        gpu_sharing.sharing({"gpunodes_gpu_sharing": SEVEN, "gpunodes_burn_in": True})


# --- the plan ---


def planned(value: dict[str, Any], *cards: str) -> gpu.Planned:
    given = settings.resolve({"gpunodes_gpu_sharing": value})
    return gpu.planned("gpu-1", machine(*cards), gpu.requested_of(given, "1.36"))


def test_the_plan_shows_the_instances() -> None:
    found = planned(SEVEN, "H100", "H100")
    assert found.plan, found.conflicts
    text = view.plans(gpu.Plans("1.36", [found]))
    assert "2 GPUs x 7 = 14 MIG instances: 7 x 1g.10gb on each" in text
    assert "for each GPU the node offers nvidia.com/gpu: 7" in text
    assert "nvidia.com/mig-3g.40gb: 1" in view.plans(gpu.Plans("1.36", [planned(MIXED, "H100")]))
    assert "changes with a reset" in view.plans(gpu.Plans("1.36", [planned(SEVEN, "A100")]))


@pytest.mark.parametrize(
    ("profiles", "cards", "found"),
    [
        ({"1g.10gb": 7}, ["T4"], "Tesla T4 has no MIG profiles in the table"),
        ({"1g.18gb": 7}, ["H100"], "H100 SXM5 80GB has no MIG profile 1g.18gb"),
        ({"1g.20gb": 5}, ["A100"], "5 x 1g.20gb do not fit on one A100 SXM4 80GB"),
        ({"3g.40gb": 2, "1g.10gb": 1}, ["H100"], "2 x 3g.40gb + 1 x 1g.10gb do not fit on one H100 SXM5 80GB"),
        ({"4g.40gb": 2}, ["H100"], "2 x 4g.40gb do not fit on one H100 SXM5 80GB"),
        ({"1g.10gb": 7}, ["H100", "B200"], "B200 has no MIG profile 1g.10gb"),
    ],
)
def test_what_a_card_lacks_is_refused_in_one_sentence(profiles: dict[str, int], cards: list[str], found: str) -> None:
    [conflict] = planned({"mode": "mig", "profiles": profiles}, *cards).conflicts
    assert isinstance(conflict, Problem)
    assert conflict.found.startswith(found)
    assert conflict.wanted
    assert conflict.remedy


@pytest.mark.parametrize("layout", [[5, 4], [4, 3], [4, 3, 1], [6, 1], [3, 3, 3, 1], [4, 1, 1, 1, 1], [2, 2, 2, 2]])
def test_layouts_of_the_guide_fit(layout: list[int]) -> None:
    """By the numbers in ``names``; nothing fits beside 7g."""
    names = {1: "1g", 2: "1g, double memory", 3: "2g", 4: "3g", 5: "4g", 6: "7g"}
    shapes = {row["name"]: row for row in tables.read("mig")["shape"] if row["slices"] == 7}
    assert planner.fits([shapes[names[each]] for each in layout], 7) == (6 not in layout)


def test_every_card_of_the_table_has_a_name_a_source_and_a_profile_for_each_shape() -> None:
    table = tables.read("mig")
    products = {row["device"] for row in tables.read("gpus")["product"]}
    for card in table["card"]:
        shapes = [row for row in table["shape"] if row["slices"] == card["slices"]]
        assert len(shapes) == len(card["profiles"]) == len(set(card["profiles"]))
        assert card["source"] in table["sources"]
        assert set(card["devices"]) <= products
        compute = [row["compute"] for row in shapes]
        assert compute == [int(name.partition("g.")[0]) for name in card["profiles"]]


# --- the program ---


def test_instances_are_made_once(board: Board, tmp_path: Path) -> None:
    done = gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert "slice 2 GPUs into 7 x 1g.10gb" in done.actions
    assert board.instances == [["1g.10gb"] * 7] * 2
    assert "systemctl enable gpunodes-mig" in board.calls
    assert "systemctl stop nvidia-dcgm" in board.calls
    assert "systemctl start --no-block nvidia-dcgm" in board.calls
    assert f"nvidia-modprobe -f {board.capabilities}/gpu1/mig/gi6/ci0/access" in board.calls
    assert board.calls[-1] == "nvidia-ctk cdi generate"
    board.calls.clear()
    assert not gpu_mig.differs(LAYOUT)
    assert board.changes() == []
    assert mig.apply(LAYOUT, board.run, destroys=True) == ""
    assert board.changes() == []


def test_a_dry_run_changes_nothing(board: Board, tmp_path: Path) -> None:
    done = gpu_mig.bring(spec(tmp_path), LAYOUT, check=True)
    assert done.actions
    assert board.changes() == []
    assert not Path(gpu_mig.UNIT).exists()
    assert not Path(ledger.PATH).parent.exists()


def test_nothing_is_changed_while_a_process_uses_a_gpu(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_driver, "holders", lambda _: ["python (77)"])
    with pytest.raises(MachineProblem, match=r"python \(77\) uses the GPUs"):
        gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert board.changes() == []
    assert not Path(gpu_mig.UNIT).exists()


def test_a_gpu_that_must_be_reset_waits_for_a_reboot_and_the_unit_completes_it(board: Board, tmp_path: Path) -> None:
    board.resets = False
    done = gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert "GPU GPU-0, GPU-1 changes with a reset" in done.reboot
    assert board.instances == [[], []]
    assert Path(gpu_mig.UNIT).exists()
    board.modes = list(board.pending)
    assert mig.apply(LAYOUT, board.run, destroys=False) == ""
    assert board.instances == [["1g.10gb"] * 7] * 2
    assert gpu_mig.bring(spec(tmp_path), LAYOUT, check=False).actions == []


def test_other_instances_are_replaced_by_a_join_and_never_by_the_unit(board: Board, tmp_path: Path) -> None:
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    board.change(["nvidia-smi", "mig", "-i", "GPU-0", "-cgi", "3g.40gb,3g.40gb", "-C"])
    with pytest.raises(mig.MigError, match=r"GPU-0 has 2 x 3g.40gb, and not 7 x 1g.10gb"):
        mig.apply(LAYOUT, board.run, destroys=False)
    assert board.instances[0] == ["3g.40gb", "3g.40gb"]
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert board.instances == [["1g.10gb"] * 7] * 2
    assert not any("-i GPU-1 -dgi" in each for each in board.calls), "the other GPU had the layout"


def test_instances_of_others_stay_without_the_setting(board: Board) -> None:
    board.modes = board.pending = ["Enabled", "Enabled"]
    board.change(["nvidia-smi", "mig", "-i", "GPU-0", "-cgi", "7g.80gb", "-C"])
    assert not gpu_mig.differs({})
    assert gpu_mig.bring(gpu_mig.REMOVED, {}, check=False).actions == []
    assert board.instances[0] == ["7g.80gb"]


def test_own_instances_go_with_the_setting(board: Board, tmp_path: Path) -> None:
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert gpu_mig.differs({})
    done = gpu_mig.bring(gpu_mig.REMOVED, {}, check=False)
    assert "turn MIG off on 2 GPUs" in done.actions
    assert board.modes == ["Disabled", "Disabled"]
    assert board.instances == [[], []]
    assert "systemctl disable gpunodes-mig.service" in board.calls
    assert not Path(gpu_mig.UNIT).exists()
    assert not Path(gpu_mig.PROGRAM).exists()
    assert gpu_mig.bring(gpu_mig.REMOVED, {}, check=False).actions == []


def test_a_mode_that_ends_with_a_reset_keeps_the_files_until_then(board: Board, tmp_path: Path) -> None:
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    board.resets = False
    assert gpu_mig.remove(check=False).reboot
    assert "systemctl disable gpunodes-mig.service" in board.calls, "the next boot must not make them again"
    board.modes = list(board.pending)
    assert gpu_mig.remove(check=False).reboot == ""
    assert not gpu_mig.is_made()


def test_the_first_line_of_nvidia_smi_that_fails_is_reported(board: Board, tmp_path: Path) -> None:
    board.broken = "-cgi"
    with pytest.raises(MachineProblem, match="Unable to do that: In use by another client"):
        gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert "systemctl start --no-block nvidia-dcgm" in board.calls, "services come back after a failure, too"


class Killed(BaseException):
    """As SIGKILL: nothing runs after it."""


@pytest.mark.parametrize("broken", ["systemctl stop", "-mig 1", "-cgi", "nvidia-modprobe"])
def test_services_start_again_after_a_run_that_was_killed(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Also where the next run has nothing else to do."""

    def run(argv: Sequence[str]) -> tuple[int, str]:
        done = board.run(argv)
        if argv[:2] == ["systemctl", "stop"]:
            board.active.discard(argv[-1])
        if broken in " ".join(argv):
            raise Killed
        return done

    monkeypatch.setattr(gpu_mig, "_run", run)
    starts = mig.start_services
    monkeypatch.setattr(mig, "start_services", lambda _: None)
    with pytest.raises(Killed):
        gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    monkeypatch.setattr(mig, "start_services", starts)
    monkeypatch.setattr(gpu_mig, "_run", board.run)
    assert "systemctl start --no-block nvidia-dcgm" not in board.calls
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    assert board.calls.count("systemctl start --no-block nvidia-dcgm") == 1
    assert not Path(mig.STOPPED).exists()
    assert board.instances == [["1g.10gb"] * 7] * 2


def test_a_machine_whose_gpu_is_broken_can_be_left(board: Board, tmp_path: Path) -> None:
    """A join without the setting fails there, and says why; a reset does not."""
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    board.broken = "nvidia-smi -q"
    with pytest.raises(MachineProblem, match="nvidia-smi -q -x"):
        gpu_mig.bring(gpu_mig.REMOVED, {}, check=False)
    assert gpu_mig.is_made()
    gpu_mig.remove(check=False, leaves=True)
    assert "systemctl disable gpunodes-mig.service" in board.calls
    assert not gpu_mig.is_made()


def test_a_program_without_its_unit_is_removed(board: Board, tmp_path: Path) -> None:
    """A run was killed between both."""
    gpu_mig.bring(spec(tmp_path), LAYOUT, check=False)
    Path(gpu_mig.UNIT).unlink()
    assert gpu_mig.bring(gpu_mig.REMOVED, {}, check=False).actions == [f"remove {gpu_mig.PROGRAM}"]
    assert not Path(gpu_mig.PROGRAM).exists()
    assert board.instances == [["1g.10gb"] * 7] * 2, "whose they are is not known any more"


def test_the_level_host_fails_without_the_layout(board: Board) -> None:
    ok = {"level": "host", "state": "ok", "fact": "driver 580, 2 x H100", "wanted": "", "remedy": ""}
    [level] = gpu_mig.checked([ok], LAYOUT)
    assert (level["state"], level["fact"], level["wanted"]) == ("failed", "GPU GPU-0 has no MIG", "7 x 1g.10gb")
    mig.apply(LAYOUT, board.run, destroys=True)
    assert gpu_mig.checked([ok], LAYOUT)[0]["fact"] == "driver 580, 2 x H100, 7 x 1g.10gb each"
    assert gpu_mig.checked([ok], {}) == [ok]


def test_the_file_of_the_unit_runs_alone(tmp_path: Path) -> None:
    """Its only neighbours are the standard library and the programs of the machine."""
    [program, unit] = planner.spec("gpu", "mig-1g.10gb-7", general.program("mig")).files
    assert f"ExecStart={program.path} 1g.10gb=7" in unit.content
    assert "Before=kubelet.service" in unit.content
    file = tmp_path / "gpu-mig"
    file.write_text(program.content)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    smi.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-I", str(file), "1g.10gb=7"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.partition(";")[0]) == (1, "`nvidia-smi -q -x`: No devices were found")


def test_containers_that_see_all_gpus_also_list_their_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "GPU 0: H100 (UUID: GPU-0)\n  MIG 1g.10gb     Device  0: (UUID: MIG-0-0)\n"
    done = CommandResult(["x"], 0, listing, "")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/usr/bin/ctr")
    monkeypatch.setattr(gpu_verify, "pull", lambda *_: done)
    monkeypatch.setattr(gpu_verify, "run_alone", lambda *_: done)
    report = gpu_verify.SmiReport("580", "13.0", [{"uuid": "GPU-0"}])
    assert gpu_verify._container("image", "containerd", report).state == "ok"


# --- the device plugin ---


@pytest.mark.parametrize(("label", "strategy"), [("mig-1g.10gb-7", "single"), ("mig-3g.40gb-1-1g.10gb-4", "mixed")])
def test_the_plugin_gets_the_strategy_and_the_capability(label: str, strategy: str) -> None:
    found = rendered(label)
    config = yaml.safe_load(found["ConfigMap", f"nvidia-device-plugin-{label}"]["data"]["config.yaml"])
    assert config == {"version": "v1", "flags": {"migStrategy": strategy}}
    plugin = found["DaemonSet", f"nvidia-device-plugin-{label}"]["spec"]["template"]["spec"]
    assert plugin["nodeSelector"] == {"gpunodes.dev/gpu": "true", devices.SHARING: label}
    [container] = plugin["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert {"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"} in container["env"]
    plain = found["DaemonSet", "nvidia-device-plugin-daemonset"]["spec"]["template"]["spec"]["containers"][0]
    assert "add" not in plain["securityContext"]["capabilities"]
