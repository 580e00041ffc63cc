"""Programs on a machine, with any login shell, and with a sudo with and without a password."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import command_lock, sent
from gpunodes.engine import locks, machine_control
from gpunodes.engine.cluster.connection import over_ssh
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.remote import answers, commands, probing, programs
from gpunodes.engine.remote.commands import Become
from gpunodes.engine.remote.programs import Program
from gpunodes.engine.remote.reach import ProbeResult, Reach
from gpunodes.engine.remote.targets import target
from gpunodes.errors import GpunodesError
from gpunodes.repair import escalation

from tests import sshd

# Like sudo -S: reads one line, byte by byte, when it asks. It refuses what it does not know.
_SUDO = """#!/bin/sh
if [ -n "$ASKS" ]; then
    [ "$1" = -S ] || { echo "sudo: a password is required" >&2; exit 1; }
    IFS= read -r said
    [ "$said" = "$ASKS" ] || { echo "Sorry, try again." >&2; exit 1; }
fi
echo "Your password will expire in 3 days."
case "$1 $2" in "-S -p") shift 3 ;; "-n "*) shift ;; *) exit 9 ;; esac
BY_SUDO=yes exec "$@"
"""
_SAY = ("sh", "-c", 'echo "$BY_SUDO it is $(cat)"')


def _run(
    tmp_path: Path, variables: dict[str, str], user: str, asks: str, rise: Become = Become.ALWAYS
) -> tuple[bytes | None, str]:
    """The output of the program, and standard error."""
    for name, text in (("sudo", _SUDO), ("id", f"#!/bin/sh\necho {user}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = commands.remote(_SAY, variables, rise, b"first\nsecond")
    done = subprocess.run(
        ["sh", "-c", command.line],
        input=command.stdin,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKS": asks},
        capture_output=True,
        check=False,
    )
    return answers.unframed(done.stdout), done.stderr.decode()


@pytest.mark.parametrize("rise", [Become.ALWAYS, Become.IF_POSSIBLE])
@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("asks", ["", 'pa ss"w\\n$x'])
def test_the_password_goes_to_sudo_and_the_rest_to_the_program(
    tmp_path: Path, user: str, asks: str, rise: Become
) -> None:
    variables = {"ansible_become_password": 'pa ss"w\\n$x'}
    by_sudo = b"yes" if user == "1000" else b""
    assert _run(tmp_path, variables, user, asks, rise)[0] == by_sudo + b" it is first\nsecond\n"
    assert "pa ss" not in commands.remote(["true"], variables).line


def test_without_a_password_nothing_stands_before_the_input(tmp_path: Path) -> None:
    assert _run(tmp_path, {}, "1000", "")[0] == b"yes it is first\nsecond\n"
    assert "a password is required" in _run(tmp_path, {}, "1000", "x")[1]


def test_an_optional_sudo_is_skipped_where_it_asks_for_a_password(tmp_path: Path) -> None:
    assert _run(tmp_path, {}, "1000", "x", Become.IF_POSSIBLE)[0] == b" it is first\nsecond\n"
    assert _run(tmp_path, {}, "1000", "", Become.IF_POSSIBLE)[0] == b"yes it is first\nsecond\n"
    assert _run(tmp_path, {"ansible_become_pass": "x"}, "1000", "x", Become.NEVER)[0] == b" it is first\nsecond\n"


def test_a_wrong_password_is_reported(tmp_path: Path) -> None:
    answer, error = _run(tmp_path, {"ansible_become_pass": "wrong"}, "1000", "right")
    assert answer is None
    assert "try again" in error


# --- login shells ----------------------------------------------------------------------------------------------------

SHELLS = {
    "sh": "sh -c",
    "bash": "bash -c",
    "fish": "fish -c",
    "csh": "tcsh -c",
    "greets": "echo 'Welcome to {\"asked\": true} gpu-1'; printf 'load: 0.42 \\351 '; exec bash -c",
}
ODD = [
    "",
    "a b",
    "it's",
    "a!b",
    "!!",
    "a\\nb",
    "\\'",
    "$HOME `id` $(id)",
    '"',
    "*?[a-z]~#;&|<>(){}%^",
    "ü",
    "-n",
    "a=b",
]


def _installed(name: str) -> str:
    program = SHELLS[name].split()[0]
    assert program == "echo" or shutil.which(program), f"{program} is missing; make setup installs it"
    return name


@pytest.mark.parametrize("name", [name for name in SHELLS if name != "greets"])
def test_every_login_shell_passes_the_same_arguments(name: str, tmp_path: Path) -> None:
    """fish and csh treat quotes, backslashes and exclamation marks differently."""
    words = [*SHELLS[_installed(name)].split(), commands.remote(["printf", "<%s>", *ODD], {}, Become.NEVER).line]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True)
    assert (answers.unframed(done.stdout) or b"").decode() == "".join(f"<{word}>" for word in ODD)


def test_control_characters_and_line_breaks_are_refused() -> None:
    for word in ("a\nb", "a\0b", "\x1b[2J"):
        with pytest.raises(ValueError, match="command line"):
            commands.quoted(word)


def test_a_program_runs_with_the_python_of_the_inventory() -> None:
    program = Program("test", zlib.compress(b"import sys; print('it is', sys.executable)"))
    words = program.argv({"ansible_python_interpreter": f"/usr/bin/env {sys.executable}"})
    done = subprocess.run(words, input=program.packed, capture_output=True, check=True)
    assert done.stdout.decode() == f"it is {sys.executable}\n"
    for unknown in ({}, {"ansible_python_interpreter": "auto_silent"}, {"ansible_python_interpreter": None}):
        assert program.argv(unknown)[0] == "/usr/bin/python3"


def test_a_program_may_read_the_input_after_itself() -> None:
    """The lock program gets heartbeats there, the session requests."""
    program = Program("test", zlib.compress(b"import os; print(os.read(0, 9))"))
    words = program.argv({"ansible_python_interpreter": sys.executable})
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        for part in (program.packed[:5], program.packed[5:] + b"the rest"):
            process.stdin.write(part)
            process.stdin.flush()
            time.sleep(0.2)
        assert process.communicate()[0] == b"b'the rest'\n"


def test_a_program_has_all_modules_that_it_imports_and_no_others() -> None:
    assert set(programs.sources("escalate")) == {"gpunodes", "gpunodes.escalate", "gpunodes.gpu_users"}
    session = {"command_lock", "disk", "kube_api", "kubeconfig", "problem", "session"}
    assert set(programs.sources("session")) == {"gpunodes", *(f"gpunodes.{name}" for name in session)}


@pytest.mark.parametrize(("name", "limit"), [("probe.document", 17_500), ("session", 11_000), ("escalate", 6000)])
def test_the_size_of_what_is_sent_is_bounded(name: str, limit: int) -> None:
    assert len(programs.pack(name, {}).packed) < limit


def test_an_error_of_a_program_names_its_module() -> None:
    program = programs.pack("session", {"kubeconfig": "/"})
    words = program.argv({"ansible_python_interpreter": sys.executable})
    done = subprocess.run(words, input=program.packed, capture_output=True, check=False)
    assert done.stdout.decode() == f"\n{sent.MARK}\n"
    assert 'File "gpunodes.kubeconfig", line ' in done.stderr.decode()


PASSWORD = 'pa ss"w\\n$x'
ASKS = "a sudo that asks"
needs_sshd = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, int], sshd.Servers]]:
    """Machines with different login shells, which get the command as sshd passes it."""
    folder = tmp_path_factory.mktemp("asks")
    for name, text in (("sudo", _SUDO), ("id", "#!/bin/sh\necho 1000\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    commands = {**SHELLS, ASKS: f"PATH={folder}:$PATH ASKS={shlex.quote(PASSWORD)} exec fish -c"}
    found = dict(zip(commands, sshd.free_ports(len(commands)), strict=True))
    places = {("127.0.0.1", found[name]): f'{words} "$SSH_ORIGINAL_COMMAND"' for name, words in commands.items()}
    with sshd.serving(tmp_path_factory.mktemp("shells"), [places]) as servers:
        yield found, servers


@pytest.fixture(params=[*SHELLS, ASKS])
def machine(
    request: pytest.FixtureRequest,
    ports: tuple[dict[str, int], sshd.Servers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """The variables of a machine with such a shell."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found, servers = ports
    return {
        "ansible_port": found[request.param if request.param == ASKS else _installed(request.param)],
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(servers.login),
        "ansible_python_interpreter": sys.executable,
        **({"ansible_become_password": PASSWORD} if request.param == ASKS else {}),
    }


@needs_sshd
def test_the_escalation_works(machine: dict[str, Any], tmp_path: Path) -> None:
    """With fish no step over SSH worked, and the repair used the BMC at once."""
    control = machine_control.MachineControl("gpu-1", "127.0.0.1", machine, 0.0)
    assert control.boot().boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    result = control.run_step(escalation.step("reboot"), "another boot", [(0.0, "force")], ())
    assert result == machine_control.StepResult(False, "the machine has already rebooted")
    assert "gpu-1.processes.txt" in control.collect(tmp_path, None, bug_report=False)
    assert (tmp_path / "gpu-1.processes.txt").read_text().split()[:2] == ["PID", "PPID"]


@needs_sshd
def test_the_probe_works(machine: dict[str, Any]) -> None:
    answer = probe_machine(machine)
    assert (answer.reach, answer.message) == (Reach.ANSWERED, "")


def probe_machine(machine: Mapping[str, Any]) -> ProbeResult:
    """The result of the probe on this machine."""
    found = target("gpu-1", {**machine, "ansible_host": "127.0.0.1"}, lambda *_: {})
    (answer,) = probing.probe([found], probing.ProbeSettings(), deadline_s=60)
    return answer


@needs_sshd
@pytest.mark.parametrize("machine", [ASKS], indirect=True)
def test_the_probe_reports_a_wrong_sudo_password(machine: dict[str, Any]) -> None:
    """Without a password it runs as the login user."""
    answer = probe_machine({**machine, "ansible_become_password": "wrong"})
    assert (answer.reach, answer.message) == (Reach.PROBE_FAILED, "Sorry, try again.")
    without = {name: value for name, value in machine.items() if name != "ansible_become_password"}
    assert probe_machine(without).reach is Reach.ANSWERED
    assert probe_machine({**machine, "ansible_become": False}).reach is Reach.ANSWERED


@needs_sshd
def test_a_session_with_the_cluster_works(machine: dict[str, Any], tmp_path: Path) -> None:
    """No cluster runs here: the program of the session reports that."""
    session = Session(over_ssh("127.0.0.1", machine, str(tmp_path / "none")))
    try:
        assert f"{tmp_path}/none does not exist" in session.request("GET", "/version").error
    finally:
        session.close()


@pytest.mark.long
@needs_sshd
def test_the_lock_over_ssh_works(machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_lock, "PATH", str(tmp_path / "lock"))
    another = locks.hold("127.0.0.1", machine, "join")
    refused = pytest.raises(GpunodesError, match="another command works on this cluster: join")
    with locks.hold("127.0.0.1", machine, "join"), refused, another:
        pass
    with locks.hold("127.0.0.1", machine, "reset"):
        pass
