"""Errors that a command must report in plain sentences, with a remedy that helps."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gpunodes import cli
from gpunodes.inventory import edit
from gpunodes.model import GpuVerification, Role
from gpunodes.views import gpu_verification

from tests.command import run

UNREACHABLE = """\
control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_user: nobody}}}
workers: {hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}}}
"""


def gpunodes(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *argv, variables={"XDG_STATE_HOME": str(folder / "state")})


def process(
    folder: Path, *argv: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own: Ansible looks for its folders once, when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", "from gpunodes.cli import main; main()", *argv],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def unreachable(tmp_path: Path) -> Path:
    """A folder with an inventory of machines that refuse SSH."""
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text(UNREACHABLE)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("command", ["status", "kubeconfig", "join gpu-1", "remove gpu-1 --yes"])
def test_a_control_plane_that_refuses_ssh_leads_to_no_new_cluster(unreachable: Path, command: str) -> None:
    done = gpunodes(unreachable, *command.split())
    assert done.returncode == 1
    assert "the SSH connection is refused" in done.stderr
    assert "correct its address" in done.stderr or "correct the address" in done.stderr
    assert "init-" not in done.stderr
    assert "--without-cluster" not in done.stderr


@pytest.mark.long
def test_an_address_that_cannot_be_reached_is_not_left_in_the_inventory(tmp_path: Path) -> None:
    for address in ("127.0.0.1", "127.0.0.2"):
        done = gpunodes(tmp_path, "init-master", address, "--port", "1", "--user", "nobody")
        assert (done.returncode, f"{address}: reachable: " in done.stderr) == (1, True), done.stderr
        assert f"not reached, and not added to inventory/hosts.yml: {address}" in done.stderr
        assert not (tmp_path / "inventory").exists()


@pytest.mark.long
def test_an_address_that_cannot_be_joined_is_not_left_in_the_inventory(tmp_path: Path) -> None:
    path = tmp_path / "inventory" / "hosts.yml"
    connection = {"ansible_port": 1, "ansible_user": "nobody"}
    edit.add(path, Role.CONTROL_PLANE, ["127.0.0.1"], connection)
    before = path.read_text()
    assert gpunodes(tmp_path, "join", "127.0.0.2").returncode == 1
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("health explain foo", "'foo' is neither a code nor a rule; wanted: xid or sxid, and a number; or"),
        ("health explain xid", "'xid' is not a code"),
        ("health timer --every banana -i nope.yml", "'banana' is not a time span"),
        ("health timer --every banana -i nope.yml", "error: there is no inventory at nope.yml"),
        ("status -i broken.ini", "broken.ini is not an inventory: "),
    ],
)
def test_wrong_input_is_a_sentence(tmp_path: Path, command: str, message: str) -> None:
    (tmp_path / "broken.ini").write_text("[workers\ngpu-1 ansible_host=\n")
    done = gpunodes(tmp_path, *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert all(line.startswith(("error: ", "hint: ")) for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("health", "the group workers or gpu_hosts"),
        ("power gpu-1 status", "the group workers or gpu_hosts"),
        ("repair gpu-1", "with --kubeconfig or --without-cluster workers are enough"),
        ("uncordon gpu-1", "with --kubeconfig or --without-cluster workers are enough"),
        ("health --reboot-hung", "with --kubeconfig or --without-cluster workers are enough"),
        ("status", "the group control_plane"),
        ("maintenance list", "with --kubeconfig workers are enough"),
    ],
)
def test_commands_for_existing_clusters_suggest_no_new_one(tmp_path: Path, command: str, wanted: str) -> None:
    done = gpunodes(tmp_path, *command.split())
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: there is no inventory at inventory/hosts.yml; wanted: ")
    assert error.endswith(wanted)
    assert hint == "hint: name it with -i, or write one as in `gpunodes help --page existing-cluster`"


@pytest.mark.parametrize(
    ("command", "option"), [("status", False), ("repair gpu-1 --yes", True), ("uncordon gpu-1", True)]
)
def test_an_inventory_without_a_control_plane_suggests_no_new_cluster(
    tmp_path: Path, command: str, *, option: bool
) -> None:
    (tmp_path / "hosts.yml").write_text(UNREACHABLE.splitlines()[1])
    done = gpunodes(tmp_path, *command.split(), "-i", "hosts.yml")
    assert done.returncode == 2
    assert "no machine in the group control_plane" in done.stderr
    assert "init-master" not in done.stderr
    assert ("--without-cluster" in done.stderr) == option


def test_a_number_alone_is_an_xid(tmp_path: Path) -> None:
    assert gpunodes(tmp_path, "health", "explain", "79").stdout.startswith("Xid 79: ")


@pytest.mark.parametrize("command", ["status", "gpu plan", "history", "health", "up"])
@pytest.mark.parametrize("home", ["/proc/nowhere", "file"])
def test_a_home_that_cannot_be_written_is_a_sentence(unreachable: Path, command: str, home: str) -> None:
    (unreachable / "file").touch()
    done = process(unreachable, *command.split(), HOME=str(unreachable / home), XDG_STATE_HOME="")
    assert done.returncode == 2
    assert "a folder that this user can write\nhint: set HOME" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("command", ["gates 1.36", "health rules", "--help"])
def test_a_full_disk_is_a_sentence(tmp_path: Path, command: str) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = process(tmp_path, *command.split(), stdout=full.fileno())
    assert done.returncode == 1
    message = (
        "error: cannot write: No space left on device\nhint: free some space there, then run the same command again\n"
    )
    assert done.stderr == message


def test_a_full_disk_below_the_state_folder_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/state/runs/1")

    monkeypatch.setattr(cli.root, "main", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err.startswith("error: /state/runs/1: No space left on device\nhint: free some space")


@pytest.mark.long
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_pipe_ends_a_command_quietly(unreachable: Path, stream: str) -> None:
    """The reader went away: no traceback, and no message of the interpreter when it ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from gpunodes.cli import main; main()",
            *("health rules" if stream == "stdout" else "status").split(),
        ],
        cwd=unreachable,
        env={**os.environ, "XDG_STATE_HOME": str(unreachable / "state")},
        check=False,
        text=True,
        stdout=writer if stream == "stdout" else subprocess.PIPE,
        stderr=writer if stream == "stderr" else subprocess.PIPE,
    )
    os.close(writer)
    assert (done.stdout or "", done.stderr or "") == ("", "")
    assert done.returncode in {0, 1}


def test_a_broken_pipe_to_another_program_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Only the reader of our own output may go away: a repair whose SSH process ended was a success."""

    def fail(**_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(cli.root, "main", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "Broken pipe" in capsys.readouterr().err


def test_the_gpus_of_an_unreachable_machine_are_not_counted() -> None:
    found = gpu_verification.table(
        [GpuVerification("gpu-1", 0, (), "SSH does not answer"), GpuVerification("cpu-1", 0, ())]
    )
    assert [line.split()[1] for line in found.splitlines()[1:3]] == ["-", "0"]


@pytest.mark.long
@pytest.mark.parametrize(
    "command", ["health gpu-1 --deadline 60", "status", "gpu plan gpu-1", "gpu verify", "remove gpu-1 --yes"]
)
def test_an_interrupted_command_ends_with_a_line_that_says_so(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "hosts.yml").write_text(
            UNREACHABLE.replace("ansible_port: 1", f"ansible_port: {silent.getsockname()[1]}")
        )
        process = subprocess.Popen(
            # If these tests run in the background, their children ignore an interruption.
            [
                *("env", "--default-signal=INT", sys.executable, "-c", "from gpunodes.cli import main; main()"),
                *(*command.split(), "-i", "hosts.yml"),
            ],
            cwd=tmp_path,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; run the same command again"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "command", ["remove gpu-1", "gpu remove gpu-1", "reset gpu-1", "power gpu-1 off", "repair gpu-1"]
)
def test_what_cannot_be_undone_needs_a_yes_in_one_form(unreachable: Path, command: str) -> None:
    done = gpunodes(unreachable, *command.split())
    assert done.returncode == 2
    assert "of gpu-1 is not confirmed; wanted: a yes\nhint: add --yes to run it without a terminal" in done.stderr


def test_a_no_changes_nothing(unreachable: Path) -> None:
    master, slave = os.openpty()
    os.write(master, b"n\n")
    done = subprocess.run(
        [sys.executable, "-c", "from gpunodes.cli import main; main()", "power", "gpu-1", "off"],
        cwd=unreachable,
        env={**os.environ, "XDG_STATE_HOME": str(unreachable / "state")},
        stdin=slave,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(slave)
    os.close(master)
    assert done.returncode == 2
    question = "The power of gpu-1 is switched off, without a shutdown of its system. Continue? [y/N]: "
    assert done.stderr == f"{question}error: not confirmed; nothing was changed\n"
