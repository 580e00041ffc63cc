"""What repair runs on a machine and over SSH: bounded commands, the escalation program, the API session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import escalate, gpu_users, session
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import machine_control
from gpunodes.engine.cluster import marks
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import NO_SESSION, Response, Transport
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.remote import answers, commands, programs, shell
from gpunodes.engine.remote.commands import Become, RemoteCommand
from gpunodes.engine.remote.shell import Reached
from gpunodes.health.model import Action, Finding, State, Verdict
from gpunodes.model import printable
from gpunodes.repair import escalation
from gpunodes.repair.findings import resets
from gpunodes.views import repair as views

from tests.hostile import ATTACKS


def test_command_past_its_deadline_is_killed_with_its_children() -> None:
    began = time.monotonic()
    result = shell.local(["sh", "-c", "echo begun; sleep 300 & sleep 300"], deadline_s=1)
    assert result.reached is Reached.TIMEOUT
    assert result.out == b"begun\n"
    assert time.monotonic() - began < 10


def test_output_is_bounded() -> None:
    result = shell.local(["sh", "-c", "yes"], deadline_s=20, max_bytes=100_000)
    assert len(result.out) == 100_000
    assert len(shell.local(["sh", "-c", "yes >&2 | head -c 1"], deadline_s=1).err) <= 1 << 16


def test_waiting_ends_when_the_output_is_enough() -> None:
    began = time.monotonic()
    result = shell.local(
        ["sh", "-c", "echo one; echo two; sleep 60"], deadline_s=30, is_complete=lambda out: out.endswith(b"two\n")
    )
    assert (result.reached, result.out) == (Reached.ENDED, b"one\ntwo\n")
    assert time.monotonic() - began < 10


def test_command_reads_its_input_or_ignores_it() -> None:
    data = b"x" * 300_000
    assert shell.local(["wc", "-c"], deadline_s=20, stdin=data).out.strip() == b"300000"
    assert shell.local(["true"], deadline_s=20, stdin=data).ok


@pytest.mark.parametrize(
    ("message", "reached"),
    [
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", Reached.REFUSED),
        ("Connection timed out during banner exchange", Reached.REFUSED),
        ("kex_exchange_identification: read: Connection reset by peer", Reached.REFUSED),
        ("System is going down. See pam_nologin(8).\nConnection closed by 10.0.0.1 port 22", Reached.REFUSED),
        ("Connection closed by remote host\nConnection closed by UNKNOWN port 65535", Reached.NO_RESPONSE),
        ("ssh: connect to host 10.0.0.1 port 22: Connection timed out", Reached.NO_RESPONSE),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", Reached.NO_RESPONSE),
    ],
)
def test_ssh_errors_tell_how_far_the_connection_came(message: str, reached: Reached) -> None:
    assert shell.local(["sh", "-c", f"echo '{message}' >&2; exit 255"], deadline_s=20).reached is reached


def harmless(folder: Path) -> str:
    """The program as it is sent, with every path and command that affects the machine replaced."""
    source = Path(escalate.__file__).read_text()
    for real, fake in (
        ('"/proc/sysrq-trigger"', f'"{folder}/trigger"'),
        ('"/dev/kmsg"', f'"{folder}/kmsg"'),
        ('"/run/gpunodes-gpu-reset"', f'"{folder}/reset"'),
        ('"/proc/driver/nvidia/gpus/%s/information"', f'"{folder}/%s"'),
        ('["systemctl", "reboot", "--no-wall"]', f'["touch", "{folder}/reboot"]'),
        ('["systemctl", "reboot", "--force", "--force"]', f'["touch", "{folder}/force"]'),
    ):
        assert source.count(real) == 1
        source = source.replace(real, fake)
    return source


def with_devices(folder: Path) -> str:
    """The module that finds users of GPUs: every open file of a device's name in the folder is a device for it."""
    source = Path(gpu_users.__file__).read_text()
    for real, fake in (('r"/dev/(', f'r"{folder}/('), ("_major(path) in majors", "True")):
        assert source.count(real) == 1
        source = source.replace(real, fake)
    return source


def run_step(folder: Path, path: str = "", **options: Any) -> dict[str, Any]:
    environment = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(programs.sources("escalate"), "gpunodes.escalate", harmless(folder))
        patch.setitem(programs.sources("escalate"), "gpunodes.gpu_users", with_devices(folder))
        program = programs.pack("escalate", options)
    done = subprocess.run(
        program.argv({"ansible_python_interpreter": sys.executable}),
        input=program.packed,
        env=environment,
        capture_output=True,
        timeout=60,
        check=True,
    )
    result: dict[str, Any] = json.loads(answers.unframed(done.stdout) or b"")
    return result


def wait_for(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def test_later_steps_follow_when_the_machine_still_runs(tmp_path: Path) -> None:
    (tmp_path / "trigger").touch()
    result = run_step(tmp_path, step="reboot", boot_id="", later=[[1.0, "force"], [1.5, "sysrq"]])
    assert result["done"]
    assert result["armed"] == ["force", "sysrq"]
    wait_for(tmp_path / "reboot")
    survivors = subprocess.run(["pgrep", "-f", f"^{escalate.SURVIVOR}"], capture_output=True, text=True, check=False)
    assert survivors.stdout.strip(), "systemd skips processes of this name"
    wait_for(tmp_path / "force")
    wait_for(tmp_path / "trigger", "sub")


def test_machine_that_has_already_rebooted_is_not_rebooted(tmp_path: Path) -> None:
    result = run_step(tmp_path, step="reboot", boot_id="the boot before", later=[[0.0, "force"]])
    assert not result["done"]
    time.sleep(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "succeeds"), [(0, True), (1, False)])
def test_gpu_reset_returns_the_output_of_nvidia_smi(tmp_path: Path, code: int, succeeds: bool) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/calls\necho the output\nexit {code}\n')
    program.chmod(0o755)
    result = run_step(tmp_path, str(program.parent), step="gpu-reset", boot_id="", gpus=[], limit_s=20)
    assert result == {"done": succeeds, "message": "the output"}
    assert (tmp_path / "calls").read_text() == "--gpu-reset\n"
    assert (tmp_path / "reset").exists() == succeeds, "only a successful reset resolves earlier errors in the log"


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
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ ! -e {tmp_path}/joined ] || [ -z "$2" ] || exit 3\n'
    )
    program.chmod(0o755)
    return tmp_path


def reset(folder: Path, *gpus: str) -> tuple[bool, list[str], str]:
    """Reset GPUs; whether that succeeded, the arguments of all nvidia-smi calls so far, and the message."""
    result = run_step(folder, str(folder / "bin"), step="gpu-reset", boot_id="", gpus=gpus, limit_s=3)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return result["done"], calls, result["message"]


def test_one_gpu_is_reset_while_the_other_is_used(two_gpus: Path) -> None:
    """A process that uses another GPU, or only the driver's control device, does not block a reset."""
    with (two_gpus / "nvidia1").open(), (two_gpus / "nvidiactl").open():
        assert reset(two_gpus, GPUS[0]) == (True, [f"--gpu-reset -i {GPUS[0]}"], "")
        done, calls, message = reset(two_gpus, *GPUS)
        assert (done, len(calls)) == (False, 1)
        assert message.startswith("the GPU is used by ")
    assert reset(two_gpus, *GPUS)[1][-1] == f"--gpu-reset -i {','.join(GPUS)}", "together, in one command"


def test_gpus_with_nvlink_are_reset_together_unless_one_is_used(two_gpus: Path) -> None:
    """nvidia-smi refuses to reset one GPU of a connected group: all are reset, unless a process uses one."""
    (two_gpus / "joined").touch()
    with (two_gpus / "nvidia1").open():
        assert reset(two_gpus, GPUS[0])[:2] == (False, [f"--gpu-reset -i {GPUS[0]}"])
    assert reset(two_gpus, GPUS[0])[:2] == (True, [f"--gpu-reset -i {GPUS[0]}"] * 2 + ["--gpu-reset"])


def test_gpu_with_unknown_device_file_is_not_reset_while_any_gpu_is_used(two_gpus: Path) -> None:
    """Without the device number, the processes that use it are unknown."""
    with (two_gpus / "nvidia1").open():
        assert not reset(two_gpus, "0000:99:00.0")[0]


@pytest.mark.parametrize("gpu", ["0", "-r", "GPU-1; reboot", "0000:3b:00", "0000:3b:00.0\n", "../../etc/passwd"])
def test_only_pci_addresses_are_reset(two_gpus: Path, gpu: str) -> None:
    """The addresses come from a record and are validated where they are used."""
    done, calls, message = reset(two_gpus, gpu)
    assert (done, calls) == (False, [])
    assert "not PCI addresses" in message


GPU_3B = {
    "address": "0000:3b:00.0",
    "vendor": "10de",
    "class": "030200",
    "driver": "nvidia",
    "responds": True,
    "link": None,
    "aer": None,
}
GPU_5E = {**GPU_3B, "address": "0000:5e:00.0"}
SWITCH = {**GPU_3B, "address": "0000:c5:00.0", "class": "068000"}


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
def test_gpus_to_reset(findings: Any, pci: Any, expected: tuple[str, ...]) -> None:
    """The GPUs that the verdict names, if it has no other findings and no NVSwitch connects them; otherwise all."""
    found = tuple(
        Finding("xid", gpu, action, State.HEALTHY if action is Action.NONE else State.DEGRADED)
        for gpu, action in findings
    )
    verdict = Verdict("gpu-1", "live", State.DEGRADED, Action.RESET_GPU, findings=found)
    assert resets(verdict, {"pci": pci}) == expected
    assert resets(verdict, None) == ()


def test_hanging_gpu_reset_is_bounded(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    result = run_step(tmp_path, str(program.parent), step="gpu-reset", boot_id="", gpus=[], limit_s=1)
    assert not result["done"]
    assert "nvidia-smi did not end in time" in result["message"]


def test_program_implements_all_steps_over_ssh() -> None:
    source = Path(escalate.__file__).read_text()
    assert all(f'"{step.name}"' in source for step in escalation.steps() if step.channel is escalation.Channel.SSH)


def run_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run without root privileges."""
    remote = commands.remote

    def never(
        argv: Sequence[str], variables: Mapping[str, Any], _: Any = None, stdin: bytes = b"", *, marks: bool = False
    ) -> RemoteCommand:
        return remote(argv, variables, Become.NEVER, stdin, marks=marks)

    monkeypatch.setattr(commands, "remote", never)


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
    """The local machine, with a login shell that prints a banner before each command."""
    banner = BANNERS[request.param]

    def run(_address: str, _variables: object, command: RemoteCommand, **options: Any) -> shell.RemoteResult:
        print_banner = f"printf '%b' '{banner}{'' if banner.endswith('c') or not banner else chr(92) + 'n'}'; "
        return shell.local(["sh", "-c", print_banner + command.line], stdin=command.stdin, **options)

    monkeypatch.setattr(shell, "run", run)
    run_without_root(monkeypatch)
    return machine_control.MachineControl("gpu-1", "addr", {"ansible_python_interpreter": sys.executable}, 0.0)


def test_boot_id_is_read_despite_a_banner(with_banner: machine_control.MachineControl) -> None:
    """The output of a login shell is not taken for the boot id."""
    boot = with_banner.boot()
    assert boot.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot.uptime_s > 0


def test_banner_is_not_taken_for_the_result_of_a_step(with_banner: machine_control.MachineControl) -> None:
    """A refused step stays refused, whatever the login shell prints before."""
    result = with_banner.run_step(escalation.step("reboot"), "another boot", [(0.0, "force")], ())
    assert result == machine_control.StepResult(False, "the machine has already rebooted")


def test_evidence_contains_no_banner(
    with_banner: machine_control.MachineControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed report with a banner before it could not be unpacked."""
    monkeypatch.setattr(machine_control, "_BUG_REPORT", "printf '\\037\\213'")
    assert with_banner.collect(tmp_path, None, bug_report=True)
    assert (tmp_path / "gpu-1.nvidia-bug-report.log.gz").read_bytes() == b"\x1f\x8b"


@pytest.mark.parametrize(
    "output", ["", "load: 0.42", "0.42 0.42", "01234567-89ab-cdef-0123-456789abcdef", "x" * 36 + " 1.0 2.0"]
)
def test_invalid_boot_id_is_ignored(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """A different text counts as a reboot only if it is a valid boot id."""
    monkeypatch.setattr(
        shell,
        "run",
        lambda *_, **__: shell.RemoteResult(Reached.ENDED, 0, f"\n{MARK}\n{output}\n".encode()),
    )
    assert machine_control.MachineControl("gpu-1", "addr", {}, 0.0).boot() == machine_control.Boot(Reached.ENDED)


def test_a_session_that_breaks_at_once_reports_the_reason_of_ssh() -> None:
    """Not the broken pipe, which is found first when the program is sent."""
    refused = "ssh: connect to host c1 port 22: Connection refused"
    program = f"exec 0<&-; sleep 0.3; echo '{refused}' >&2; exit 255"
    api_session = Session(Transport(["sh", "-c", program]))
    began = time.monotonic()
    response = api_session.request("GET", "/version")
    assert (response.status, "refused" in response.error) == (NO_SESSION, True), response
    assert time.monotonic() - began < 4
    api_session.close()


def test_session_ignores_a_banner() -> None:
    """Requests work on a control plane whose login shell prints a banner."""
    program = (
        f"import json, sys; print('Welcome'); print('[1]'); print({{}}); print('\\n{MARK}'); "
        "request = json.loads(sys.stdin.readline()); "
        "print(json.dumps({'id': request['id'], 'status': 200, 'body': {}, 'error': '', 'time': 1.0}), flush=True)"
    )
    api_session = Session(Transport([sys.executable, "-c", program]))
    assert api_session.request("GET", "/version").status == 200
    api_session.close()


GOOD = {"status": 200, "body": {"items": []}, "error": "", "time": 1.0}


@pytest.mark.parametrize(
    "wrong", [{"id": [1]}, {"status": "\x1b"}, {"error": 5}, {"time": "now"}, {"time": float("nan")}]
)
def test_invalid_response_of_a_session_fails_the_call_at_once(wrong: dict[str, Any]) -> None:
    """The call fails with a message, without retries; the next response may be valid."""
    program = (
        f"import json, sys; print('\\n{MARK}')\n"
        f"for wrong in ({wrong!r}, {{}}):\n"
        "    request = json.loads(sys.stdin.readline())\n"
        f"    print(json.dumps({{'id': request['id'], **{GOOD!r}, **wrong}}), flush=True)\n"
    ).replace(": nan", ": float('nan')")
    api = Cluster(Session(Transport([sys.executable, "-c", program])))
    began = time.monotonic()
    with pytest.raises(NoResponse, match=f"expected (int|str|float) in {next(iter(wrong))}"):
        api.nodes()
    assert time.monotonic() - began < 10
    assert api.nodes() == []
    api.session.close()


def test_text_from_a_machine_reaches_the_cluster_as_one_printable_line() -> None:
    class Api(Session):
        def __init__(self) -> None:
            self.sent: list[Any] = []

        def request(self, method: str, *arguments: Any, **_: Any) -> Response:
            node = {"metadata": {"name": "gpu-1", "uid": "u", "resourceVersion": "1"}}
            self.sent += [arguments[1]] if method != "GET" else []
            return Response(200, node, "", 1.0)

    text = "".join(ATTACKS)
    api = Api()
    kubernetes = Cluster(api)
    kubernetes.cordon("gpu-1", "r1", text, 0.0)
    kubernetes.give_up("gpu-1", "r1", text)
    kubernetes.event("gpu-1", "Repair", text, warning=True)
    assert [sent["message"] for sent in api.sent if "message" in sent] == [printable(text)[:1000]]
    annotations = [sent["metadata"]["annotations"] for sent in api.sent if "message" not in sent]
    assert [found[marks.REASON] for found in annotations] == [printable(text)] * 2
    assert annotations[1][marks.NEEDS_REPAIR] == printable(text)


def test_session_returns_only_the_requested_fields() -> None:
    node = {"metadata": {"name": "a", "managedFields": ["much"]}, "spec": {"podCIDR": "x"}, "status": {"images": [1]}}
    keep = ["metadata.name", "spec.unschedulable", "status.nodeInfo.bootID", "gone.far"]
    assert session.pruned(node, keep) == {"metadata": {"name": "a"}, "spec": {}, "status": {}}


def test_systemd_accepts_the_timer(tmp_path: Path) -> None:
    units = views.units("/opt/gpu nodes/gpunodes", "root", Path("/srv"), Path("/srv/a b/hosts.yml"), "10min")
    assert set(units) == {"gpunodes-health.service", "gpunodes-health.timer"}
    assert "--reboot-hung --yes" in units["gpunodes-health.service"]
    for name, text in units.items():
        # systemd-analyze checks that the program exists.
        (tmp_path / name).write_text(text.replace('"/opt/gpu nodes/gpunodes"', "/bin/true"))
    if Path("/usr/bin/systemd-analyze").exists():
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(tmp_path) not in done.stderr, done.stderr


def test_bug_report_is_collected_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-bug-report.sh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1 $2" = "--safe-mode --output-file" ] && echo the report >"$3.gz"\n')
    program.chmod(0o755)
    monkeypatch.setattr(machine_control, "_BUG_REPORT", machine_control._BUG_REPORT.replace("/run/", f"{tmp_path}/"))
    lines: list[str] = []

    def run(_address: str, _variables: object, command: RemoteCommand, **limits: Any) -> shell.RemoteResult:
        lines.append(command.line)
        if "bug-report" not in command.line:
            return shell.RemoteResult(Reached.ENDED, 0, f"\n{MARK}\nsomething".encode())
        argv = ["env", f"PATH={tmp_path}/bin:{os.environ['PATH']}", "sh", "-c", command.line]
        return shell.local(argv, deadline_s=limits["deadline_s"], max_bytes=limits["max_bytes"])

    monkeypatch.setattr(shell, "run", run)
    run_without_root(monkeypatch)
    machine = machine_control.MachineControl("gpu-1", "addr", {}, 0.0)
    assert machine.collect(tmp_path, None, bug_report=False) == ["gpu-1.kernel.log", "gpu-1.processes.txt"]
    assert not any("bug-report" in line for line in lines)
    assert "gpu-1.nvidia-bug-report.log.gz" in machine.collect(tmp_path, {"a": 1}, bug_report=True)
    assert (tmp_path / "gpu-1.nvidia-bug-report.log.gz").read_text() == "the report\n"
    assert not list(tmp_path.glob("gpunodes-bug-report*")), "nothing is left on the machine"
