"""Repair on a machine and over a pipe: limited commands, the escalation program, the session's pruning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.gpunodes import escalate, session
from gpunodes.engine import cluster, machine_control, shell
from gpunodes.engine.shell import Reached
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.model import printable
from gpunodes.operations import repair_one
from gpunodes.repair import escalation
from gpunodes.views import repair as views

from tests.hostile import ATTACKS


def test_a_command_past_its_deadline_is_killed_with_its_children() -> None:
    began = time.monotonic()
    result = shell.local(["sh", "-c", "echo begun; sleep 300 & sleep 300"], deadline_s=1)
    assert result.reached is Reached.LATE
    assert result.out == b"begun\n"
    assert time.monotonic() - began < 10


def test_output_is_limited() -> None:
    result = shell.local(["sh", "-c", "yes"], deadline_s=20, most=100_000)
    assert result.cut
    assert len(result.out) == 100_000
    assert len(shell.local(["sh", "-c", "yes >&2 | head -c 1"], deadline_s=1).err) <= 1 << 16


def test_sufficient_output_ends_the_wait() -> None:
    began = time.monotonic()
    result = shell.local(
        ["sh", "-c", "echo one; echo two; sleep 60"], deadline_s=30, enough=lambda out: out.endswith(b"two\n")
    )
    assert (result.reached, result.out) == (Reached.ENDED, b"one\ntwo\n")
    assert time.monotonic() - began < 10


def test_input_is_passed_and_may_be_ignored() -> None:
    data = b"x" * 300_000
    assert shell.local(["wc", "-c"], deadline_s=20, stdin=data).out.strip() == b"300000"
    assert shell.local(["true"], deadline_s=20, stdin=data).ok


@pytest.mark.parametrize(
    ("message", "reached"),
    [
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", Reached.REFUSED),
        ("Connection timed out during banner exchange", Reached.REFUSED),
        ("kex_exchange_identification: read: Connection reset by peer", Reached.REFUSED),
        ("ssh: connect to host 10.0.0.1 port 22: Connection timed out", Reached.SILENT),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", Reached.SILENT),
    ],
)
def test_how_far_an_ssh_connection_got(message: str, reached: Reached) -> None:
    assert shell.local(["sh", "-c", f"echo '{message}' >&2; exit 255"], deadline_s=20).reached is reached


def harmless(folder: Path) -> str:
    """The program as it is sent, with the commands and paths that reboot a machine replaced."""
    source = Path(escalate.__file__).read_text()
    for real, fake in (
        ('"/proc/sysrq-trigger"', f'"{folder}/trigger"'),
        ('"/dev/kmsg"', f'"{folder}/kmsg"'),
        ('"/run/gpunodes-gpu-reset"', f'"{folder}/reset"'),
        ('"/dev/nvidia"', f'"{folder}/nvidia"'),
        ('"/proc/driver/nvidia/gpus/%s/information"', f'"{folder}/%s"'),
        ('["systemctl", "reboot", "--no-wall"]', f'["touch", "{folder}/reboot"]'),
        ('["systemctl", "reboot", "--force", "--force"]', f'["touch", "{folder}/force"]'),
    ):
        assert source.count(real) == 1
        source = source.replace(real, fake)
    return source


def escalates(folder: Path, path: str = "", **options: Any) -> dict[str, Any]:
    environment = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
    done = subprocess.run(
        [sys.executable, "-c", escalate.BOOT, json.dumps(options)],
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


def test_a_step_and_the_following_steps_if_the_machine_is_still_up(tmp_path: Path) -> None:
    (tmp_path / "trigger").touch()
    answer = escalates(tmp_path, step="reboot", boot_id="", later=[[1.0, "force"], [1.5, "sysrq"]])
    assert answer["done"]
    assert answer["armed"] == ["force", "sysrq"]
    wait_for(tmp_path / "reboot")
    survivors = subprocess.run(["pgrep", "-f", f"^{escalate.SURVIVOR}"], capture_output=True, text=True, check=False)
    assert survivors.stdout.strip(), "not killed by systemd because of its name"
    wait_for(tmp_path / "force")
    wait_for(tmp_path / "trigger", "sub")


def test_nothing_is_done_in_another_boot(tmp_path: Path) -> None:
    answer = escalates(tmp_path, step="reboot", boot_id="the boot before", later=[[0.0, "force"]])
    assert not answer["done"]
    time.sleep(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "done"), [(0, True), (1, False)])
def test_a_gpu_reset_reports_the_output_of_nvidia_smi(tmp_path: Path, code: int, done: bool) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\necho said so\nexit {code}\n')
    program.chmod(0o755)
    answer = escalates(tmp_path, str(program.parent), step="gpu-reset", boot_id="", gpus=[], limit_s=20)
    assert answer == {"done": done, "message": "said so"}
    assert (tmp_path / "asked").read_text() == "--gpu-reset\n"
    assert (tmp_path / "reset").exists() == done, "older log lines no longer count"


GPUS = ("0000:3b:00.0", "0000:5e:00.0")


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    """The folder of a machine with two GPUs, whose nvidia-smi records its arguments."""
    for minor, gpu in enumerate(GPUS):
        (tmp_path / gpu).write_text(f"Model: \t\t NVIDIA A100\nDevice Minor: \t {minor}\nGPU Excluded: \t No\n")
        (tmp_path / f"nvidia{minor}").touch()
    (tmp_path / "nvidiactl").touch()
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ ! -e {tmp_path}/joined ] || [ -z "$2" ] || exit 3\n'
    )
    program.chmod(0o755)
    return tmp_path


def reset(folder: Path, *gpus: str) -> tuple[bool, list[str], str]:
    """Order a reset: whether it was done, the recorded arguments of nvidia-smi, and the message."""
    answer = escalates(folder, str(folder / "bin"), step="gpu-reset", boot_id="", gpus=gpus, limit_s=3)
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    return answer["done"], asked, answer["message"]


def test_one_gpu_is_reset_while_the_other_is_used(two_gpus: Path) -> None:
    """A process that uses another GPU, or only the driver's control device, does not block a reset."""
    with (two_gpus / "nvidia1").open(), (two_gpus / "nvidiactl").open():
        assert reset(two_gpus, GPUS[0]) == (True, [f"--gpu-reset -i {GPUS[0]}"], "")
        done, asked, message = reset(two_gpus, *GPUS)
        assert (done, len(asked)) == (False, 1)
        assert message.startswith("the GPU is held by ")
    assert reset(two_gpus, *GPUS)[1][-1] == f"--gpu-reset -i {','.join(GPUS)}", "together, in one command"


def test_gpus_joined_by_nvlink_are_reset_together_if_none_is_used(two_gpus: Path) -> None:
    """nvidia-smi refuses to reset one of several joined GPUs: then all are reset, unless a process uses one."""
    (two_gpus / "joined").touch()
    with (two_gpus / "nvidia1").open():
        assert reset(two_gpus, GPUS[0])[:2] == (False, [f"--gpu-reset -i {GPUS[0]}"])
    assert reset(two_gpus, GPUS[0])[:2] == (True, [f"--gpu-reset -i {GPUS[0]}"] * 2 + ["--gpu-reset"])


def test_an_unknown_gpu_is_not_reset_while_any_gpu_is_used(two_gpus: Path) -> None:
    """Without its device number the processes that use it are unknown."""
    with (two_gpus / "nvidia1").open():
        assert not reset(two_gpus, "0000:99:00.0")[0]


@pytest.mark.parametrize("gpu", ["0", "-r", "GPU-1; reboot", "0000:3b:00", "0000:3b:00.0\n", "../../etc/passwd"])
def test_only_pci_addresses_are_reset(two_gpus: Path, gpu: str) -> None:
    """Addresses from a record are checked before use."""
    done, asked, message = reset(two_gpus, gpu)
    assert (done, asked) == (False, [])
    assert "no PCI addresses" in message


GPU_3B = {"address": "0000:3b:00.0", "vendor": "10de", "class": "030200"}
GPU_5E = {"address": "0000:5e:00.0", "vendor": "10de", "class": "030200"}
SWITCH = {"address": "0000:c5:00.0", "vendor": "10de", "class": "068000"}


@pytest.mark.parametrize(
    ("findings", "pci", "expected"),
    [
        ([("0000:3b:00.0", Action.RESET_GPU)], [GPU_3B, GPU_5E], ("0000:3b:00.0",)),
        ([("0000:3b:00.0", Action.RESET_GPU)], [GPU_3B, GPU_5E, SWITCH], ()),
        ([("0000:3b:00.0", Action.RESET_GPU), ("0000:5e:00.0", Action.RESTART_APP)], [GPU_3B, GPU_5E], ()),
        ([("", Action.RESET_GPU)], [GPU_3B, GPU_5E], ()),
        ([("0000:77:00.0", Action.RESET_GPU)], [GPU_3B, GPU_5E], ()),
        ([("0000:5e:00.0", Action.RESET_GPU), ("0000:3b:00.0", Action.NONE)], [GPU_3B, GPU_5E], ("0000:5e:00.0",)),
        ([], [GPU_3B], ()),
    ],
)
def test_which_gpus_a_reset_names(findings: Any, pci: Any, expected: tuple[str, ...]) -> None:
    """The GPUs that the verdict names if there is no other fault and no NVSwitch; otherwise all."""
    made = tuple(
        Finding("xid", gpu, action, State.HEALTHY if action is Action.NONE else State.DEGRADED)
        for gpu, action in findings
    )
    verdict = Verdict("gpu-1", "live", State.DEGRADED, Action.RESET_GPU, findings=made)
    assert repair_one.resets(verdict, {"pci": pci}) == expected
    assert repair_one.resets(verdict, None) == ()


def test_a_gpu_reset_that_hangs_is_left_behind(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    answer = escalates(tmp_path, str(program.parent), step="gpu-reset", boot_id="", gpus=[], limit_s=1)
    assert not answer["done"]
    assert "did not end in time" in answer["message"]


def test_the_program_knows_all_steps_that_need_a_shell() -> None:
    source = Path(escalate.__file__).read_text()
    assert all(f'"{step.name}"' in source for step in escalation.steps() if step.channel is escalation.Channel.SSH)


BANNERS = {
    "none": "",
    "text": "Welcome to gpu-1",
    "numbers": "load: 0.42",
    "json": '{"done": true}',
    "half a line": "no newline\\c",
    "much": "x" * 60_000,
}


@pytest.fixture(params=list(BANNERS))
def with_banner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> machine_control.MachineControl:
    """A machine, this one, whose login shell prints a banner before each command."""
    banner = BANNERS[request.param]

    def run(_address: str, _variables: object, words: str, **more: Any) -> shell.RemoteResult:
        printing = f"printf '%b' '{banner}{'' if banner.endswith('c') or not banner else chr(92) + 'n'}'; "
        return shell.local(["sh", "-c", printing + words], **more)

    monkeypatch.setattr(shell, "run", run)
    # Runs as the test's user instead of root.
    remote = shell.remote
    monkeypatch.setattr(
        shell, "remote", lambda words, variables, _rise="": remote(words, variables, shell.Become.NEVER)
    )
    return machine_control.MachineControl("gpu-1", "addr", {"ansible_python_interpreter": sys.executable}, 0.0)


def test_a_banner_is_not_taken_for_a_boot_id_and_hides_none(with_banner: machine_control.MachineControl) -> None:
    """The login shell's output is not taken for the boot id, and the boot id is still read."""
    boot = with_banner.boot()
    assert boot.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot.uptime_s > 0


def test_a_banner_is_not_the_result_of_an_order(with_banner: machine_control.MachineControl) -> None:
    """A refused order stays refused, whatever the login shell prints before."""
    ordered = with_banner.ask(escalation.step("reboot"), "another boot", [(0.0, "force")], ())
    assert ordered == machine_control.StepResult(False, "another boot runs already")


def test_evidence_contains_no_banner(
    with_banner: machine_control.MachineControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed report with a banner before it could not be unpacked."""
    monkeypatch.setattr(machine_control, "_BUG_REPORT", "printf '\\037\\213'")
    assert with_banner.collect(tmp_path, None, bug_report=True)
    assert (tmp_path / "gpu-1.nvidia-bug-report.log.gz").read_bytes() == b"\x1f\x8b"


@pytest.mark.parametrize(
    "answer", ["", "load: 0.42", "0.42 0.42", "01234567-89ab-cdef-0123-456789abcdef", "x" * 36 + " 1.0 2.0"]
)
def test_other_text_is_not_a_boot_id(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Changed text counts as a reboot only if it is a boot id."""
    monkeypatch.setattr(
        shell,
        "run",
        lambda *_, **__: shell.RemoteResult(Reached.ENDED, 0, f"\ngpunodes-answer-follows\n{answer}\n".encode()),
    )
    assert machine_control.MachineControl("gpu-1", "addr", {}, 0.0).boot() == machine_control.Boot(Reached.ENDED)


def test_a_session_ignores_a_banner() -> None:
    """A control plane whose login shell prints a banner can be queried."""
    program = (
        "import json, sys; print('Welcome'); print('[1]'); sys.stdin.readline(); "
        "asked = json.loads(sys.stdin.readline()); "
        "print(json.dumps({'id': asked['id'], 'status': 200, 'body': {}, 'error': '', 'time': 1.0}), flush=True)"
    )
    session_here = cluster.Session(cluster.Transport([sys.executable, "-c", program]))
    assert session_here.ask("GET", "/version").status == 200
    session_here.close()


GOOD = {"status": 200, "body": {"items": []}, "error": "", "time": 1.0}


@pytest.mark.parametrize(
    "odd", [{"id": [1]}, {"status": "\x1b"}, {"error": 5}, {"time": "now"}, {"time": float("nan")}]
)
def test_an_invalid_answer_of_a_session_ends_the_call_at_once(odd: dict[str, Any]) -> None:
    """With a sentence and without waiting; the next answer may be valid."""
    program = (
        "import json, sys\n"
        "sys.stdin.readline()\n"
        f"for odd in ({odd!r}, {{}}):\n"
        "    asked = json.loads(sys.stdin.readline())\n"
        f"    print(json.dumps({{'id': asked['id'], **{GOOD!r}, **odd}}), flush=True)\n"
    ).replace(": nan", ": float('nan')")
    api = cluster.Cluster(cluster.Session(cluster.Transport([sys.executable, "-c", program])))
    began = time.monotonic()
    with pytest.raises(cluster.NoResponse, match=f"its answer has no (int|str|float) in {next(iter(odd))}"):
        api.nodes()
    assert time.monotonic() - began < 10
    assert api.nodes() == []
    api.session.close()


def test_a_machine_s_text_reaches_the_cluster_as_one_printable_line() -> None:
    class Api(cluster.Session):
        def __init__(self) -> None:
            self.sent: list[Any] = []

        def ask(self, method: str, *arguments: Any, **_: Any) -> cluster.Response:
            node = {"metadata": {"name": "gpu-1", "uid": "u", "resourceVersion": "1"}}
            self.sent += [arguments[1]] if method != "GET" else []
            return cluster.Response(200, node, "", 1.0)

    words = "".join(ATTACKS)
    api = Api()
    repaired = cluster.Cluster(api)
    repaired.cordon("gpu-1", "r1", words)
    repaired.give_up("gpu-1", "r1", words)
    repaired.event("gpu-1", "Repair", words, warning=True)
    assert [sent["message"] for sent in api.sent if "message" in sent] == [printable(words)[:1000]]
    annotations = [sent["metadata"]["annotations"] for sent in api.sent if "message" not in sent]
    assert [found[cluster.REASON] for found in annotations] == [printable(words)] * 2
    assert annotations[1][cluster.NEEDS_REPAIR] == printable(words)


def test_only_requested_fields_of_an_answer_are_transferred() -> None:
    node = {"metadata": {"name": "a", "managedFields": ["much"]}, "spec": {"podCIDR": "x"}, "status": {"images": [1]}}
    keep = ["metadata.name", "spec.unschedulable", "status.nodeInfo.bootID", "gone.far"]
    assert session.pruned(node, keep) == {"metadata": {"name": "a"}, "spec": {}, "status": {}}


def test_systemd_accepts_the_timer(tmp_path: Path) -> None:
    units = views.units("/opt/gpu nodes/gpunodes", "root", Path("/srv"), Path("/srv/a b/hosts.yml"), "10min")
    assert set(units) == {"gpunodes-health.service", "gpunodes-health.timer"}
    assert "--reboot-hung --yes" in units["gpunodes-health.service"]
    for name, text in units.items():
        # systemd-analyze requires an existing program.
        (tmp_path / name).write_text(text.replace('"/opt/gpu nodes/gpunodes"', "/bin/true"))
    if Path("/usr/bin/systemd-analyze").exists():
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(tmp_path) not in done.stderr, done.stderr


def test_a_bug_report_is_collected_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-bug-report.sh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1 $2" = "--safe-mode --output-file" ] && echo the report >"$3.gz"\n')
    program.chmod(0o755)
    monkeypatch.setattr(machine_control, "_BUG_REPORT", machine_control._BUG_REPORT.replace("/run/", f"{tmp_path}/"))
    asked: list[str] = []

    def run(_address: str, _variables: object, words: str, **bounds: Any) -> shell.RemoteResult:
        asked.append(words)
        if "bug-report" not in words:
            return shell.RemoteResult(Reached.ENDED, 0, b"\ngpunodes-answer-follows\nsomething")
        program = ["env", f"PATH={tmp_path}/bin:{os.environ['PATH']}", "sh", "-c", words]
        return shell.local(program, deadline_s=bounds["deadline_s"], most=bounds["most"])

    monkeypatch.setattr(shell, "run", run)
    # Runs as the test's user instead of root.
    remote = shell.remote
    monkeypatch.setattr(
        shell, "remote", lambda words, variables, _rise="": remote(words, variables, shell.Become.NEVER)
    )
    machine = machine_control.MachineControl("gpu-1", "addr", {}, 0.0)
    assert machine.collect(tmp_path, None, bug_report=False) == ["gpu-1.kernel.log", "gpu-1.processes.txt"]
    assert not any("bug-report" in words for words in asked)
    assert "gpu-1.nvidia-bug-report.log.gz" in machine.collect(tmp_path, {"a": 1}, bug_report=True)
    assert (tmp_path / "gpu-1.nvidia-bug-report.log.gz").read_text() == "the report\n"
    assert not list(tmp_path.glob("gpunodes-bug-report*")), "nothing is left on the machine"
