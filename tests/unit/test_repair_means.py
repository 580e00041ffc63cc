"""What repair does on a machine and over a pipe: bounded commands, the program that climbs, the session's pruning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.gpunodes import climb, session
from gpunodes.engine import hands, shell
from gpunodes.engine.shell import Reached
from gpunodes.repair import ladder
from gpunodes.views import repair as views


def test_a_command_that_never_ends_is_ended_with_all_that_it_started() -> None:
    began = time.monotonic()
    said = shell.local(["sh", "-c", "echo begun; sleep 300 & sleep 300"], deadline_s=1)
    assert said.reached is Reached.LATE
    assert said.out == b"begun\n"
    assert time.monotonic() - began < 10


def test_output_is_bounded() -> None:
    said = shell.local(["sh", "-c", "yes"], deadline_s=20, most=100_000)
    assert said.cut
    assert len(said.out) == 100_000
    assert len(shell.local(["sh", "-c", "yes >&2 | head -c 1"], deadline_s=1).err) <= 1 << 16


def test_what_is_enough_ends_the_waiting() -> None:
    began = time.monotonic()
    said = shell.local(
        ["sh", "-c", "echo one; echo two; sleep 60"], deadline_s=30, enough=lambda out: out.endswith(b"two\n")
    )
    assert (said.reached, said.out) == (Reached.ENDED, b"one\ntwo\n")
    assert time.monotonic() - began < 10


def test_input_comes_through_and_may_be_ignored() -> None:
    data = b"x" * 300_000
    assert shell.local(["wc", "-c"], deadline_s=20, stdin=data).out.strip() == b"300000"
    assert shell.local(["true"], deadline_s=20, stdin=data).ok


@pytest.mark.parametrize(
    ("said", "reached"),
    [
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", Reached.REFUSED),
        ("Connection timed out during banner exchange", Reached.REFUSED),
        ("kex_exchange_identification: read: Connection reset by peer", Reached.REFUSED),
        ("ssh: connect to host 10.0.0.1 port 22: Connection timed out", Reached.SILENT),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", Reached.SILENT),
    ],
)
def test_how_far_ssh_came(said: str, reached: Reached) -> None:
    assert shell.local(["sh", "-c", f"echo '{said}' >&2; exit 255"], deadline_s=20).reached is reached


def harmless(folder: Path) -> str:
    """The program as it is sent, with the three words that bring a machine down replaced."""
    source = Path(climb.__file__).read_text()
    for real, fake in (
        ('"/proc/sysrq-trigger"', f'"{folder}/trigger"'),
        ('"/dev/kmsg"', f'"{folder}/kmsg"'),
        ('"/run/gpunodes-gpu-reset"', f'"{folder}/reset"'),
        ('["systemctl", "reboot", "--no-wall"]', f'["touch", "{folder}/reboot"]'),
        ('["systemctl", "reboot", "--force", "--force"]', f'["touch", "{folder}/force"]'),
    ):
        assert source.count(real) == 1
        source = source.replace(real, fake)
    return source


def climbs(folder: Path, path: str = "", **options: Any) -> dict[str, Any]:
    environment = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
    done = subprocess.run(
        [sys.executable, "-c", climb.BOOT, json.dumps(options)],
        input=harmless(folder),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def wait_for(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def test_a_rung_and_what_follows_when_the_machine_is_still_there(tmp_path: Path) -> None:
    (tmp_path / "trigger").touch()
    answer = climbs(tmp_path, rung="reboot", boot_id="", later=[[1.0, "force"], [1.5, "sysrq"]])
    assert answer["asked"]
    assert answer["armed"] == ["force", "sysrq"]
    wait_for(tmp_path / "reboot")
    survivors = subprocess.run(["pgrep", "-f", f"^{climb.SURVIVOR}"], capture_output=True, text=True, check=False)
    assert survivors.stdout.strip(), "spared by systemd for its name"
    wait_for(tmp_path / "force")
    wait_for(tmp_path / "trigger", "sub")


def test_another_boot_is_left_alone(tmp_path: Path) -> None:
    answer = climbs(tmp_path, rung="reboot", boot_id="the boot before", later=[[0.0, "force"]])
    assert not answer["asked"]
    time.sleep(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "asked"), [(0, True), (1, False)])
def test_a_gpu_reset_tells_what_nvidia_smi_said(tmp_path: Path, code: int, asked: bool) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\necho said so\nexit {code}\n')
    program.chmod(0o755)
    answer = climbs(tmp_path, str(program.parent), rung="gpu-reset", boot_id="", gpus=[], limit_s=20)
    assert answer == {"asked": asked, "said": "said so"}
    assert (tmp_path / "asked").read_text() == "--gpu-reset\n"
    assert (tmp_path / "reset").exists() == asked, "what the log says of before is over"


def test_a_gpu_reset_that_hangs_is_left_behind(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    answer = climbs(tmp_path, str(program.parent), rung="gpu-reset", boot_id="", gpus=[], limit_s=1)
    assert not answer["asked"]
    assert "did not end in time" in answer["said"]


def test_the_program_knows_all_rungs_that_need_a_shell() -> None:
    source = Path(climb.__file__).read_text()
    assert all(f'"{rung.name}"' in source for rung in ladder.rungs() if rung.over is ladder.Over.SSH)


def test_only_what_is_kept_of_an_answer_travels() -> None:
    node = {"metadata": {"name": "a", "managedFields": ["much"]}, "spec": {"podCIDR": "x"}, "status": {"images": [1]}}
    keep = ["metadata.name", "spec.unschedulable", "status.nodeInfo.bootID", "gone.far"]
    assert session.pruned(node, keep) == {"metadata": {"name": "a"}, "spec": {}, "status": {}}


def test_the_timer_is_one_that_systemd_takes(tmp_path: Path) -> None:
    units = views.units("/opt/gpu nodes/gpunodes", "root", Path("/srv"), Path("/srv/a b/hosts.yml"), "10min")
    assert set(units) == {"gpunodes-health.service", "gpunodes-health.timer"}
    assert "--reboot-hung --yes" in units["gpunodes-health.service"]
    for name, text in units.items():
        # systemd-analyze wants a program that is there.
        (tmp_path / name).write_text(text.replace('"/opt/gpu nodes/gpunodes"', "/bin/true"))
    if Path("/usr/bin/systemd-analyze").exists():
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(tmp_path) not in done.stderr, done.stderr


def test_a_bug_report_is_kept_only_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-bug-report.sh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1 $2" = "--safe-mode --output-file" ] && echo the report >"$3.gz"\n')
    program.chmod(0o755)
    monkeypatch.setattr(hands, "_BUG_REPORT", hands._BUG_REPORT.replace("/run/", f"{tmp_path}/"))
    asked: list[str] = []

    def run(_address: str, _variables: object, words: str, **bounds: Any) -> shell.Said:
        asked.append(words)
        if "bug-report" not in words:
            return shell.Said(Reached.ENDED, 0, b"something")
        program = ["env", f"PATH={tmp_path}/bin:{os.environ['PATH']}", "sh", "-c", words]
        return shell.local(program, deadline_s=bounds["deadline_s"], most=bounds["most"])

    monkeypatch.setattr(shell, "run", run)
    monkeypatch.setattr(shell, "as_root", lambda words, variables: words)
    machine = hands.Hands("gpu-1", "addr", {}, 0.0)
    assert machine.collect(tmp_path, None, bug_report=False) == ["gpu-1.kernel.log", "gpu-1.processes.txt"]
    assert not any("bug-report" in words for words in asked)
    assert "gpu-1.nvidia-bug-report.log.gz" in machine.collect(tmp_path, {"a": 1}, bug_report=True)
    assert (tmp_path / "gpu-1.nvidia-bug-report.log.gz").read_text() == "the report\n"
    assert not list(tmp_path.glob("gpunodes-bug-report*")), "nothing is left on the machine"
