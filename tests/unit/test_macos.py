"""macOS as a controller: what runs there uses nothing that only Linux has, or asks for the system first.

The lab, the power server and what is sent to machines run on Linux. Nothing of this has run on macOS.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.engine import locks, runner
from gpunodes.engine.leases import holders

PACKAGE = Path(__file__).parents[2] / "bootstrap" / "gpunodes"
LINUX = ("lab", "autoscale", "ansible/module_utils", "ansible/modules")
CONTROLLER = [
    path for path in sorted(PACKAGE.rglob("*.py")) if not path.relative_to(PACKAGE).as_posix().startswith(LINUX)
]
ONLY_ON_LINUX = re.compile(
    r"os\.(memfd_create|eventfd\w*|pidfd_open|sched_\w+|posix_fadvise|getrandom|splice|copy_file_range|setns|unshare"
    r"|[gs]etxattr|listxattr|removexattr|O_TMPFILE|O_PATH|O_DIRECT|O_NOATIME|getresuid|getresgid|fork)"
    r"|select\.(epoll|EPOLL\w*)"
    r"|signal\.(pidfd_send_signal|SIGRTMIN|SIGRTMAX|SIGPWR|sigwaitinfo|sigtimedwait)"
    r"|socket\.(AF_NETLINK|AF_PACKET|AF_VSOCK|SO_PEERCRED|SO_BINDTODEVICE|SO_MARK|TCP_USER_TIMEOUT|TCP_KEEPIDLE)"
    r"|time\.CLOCK_BOOTTIME"
    r"|fcntl\.F_(OFD|ADD_SEALS|SETPIPE)\w*"
)
"""Names of the standard library: those that typeshed has for Linux only, and ``fork`` beside threads."""
PROGRAMS = {"flock", "ip", "nproc", "setpriv", "setsid", "stdbuf", "systemctl", "systemd-run", "taskset", "timeout"}
"""Programs that macOS does not have."""
READERS = {"Path", "open", "read_text", "read_bytes", "stat", "listdir", "scandir", "readlink"}
STARTERS = {"run", "Popen", "check_output", "check_call", "call"}


def uses(path: Path) -> Iterator[str]:
    """What a file uses of Linux, outside of functions that ask for the system first."""
    tree = ast.parse(path.read_text())
    asking = [
        function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and re.search(r"sys\.platform|hasattr\(os, ", ast.unparse(function))
    ]
    asked = {id(node) for function in asking for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) not in asked and (found := of_linux(node)):
            yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)} {found}"


def of_linux(node: ast.AST) -> str:
    """What one node uses of Linux; "" for nothing."""
    if isinstance(node, ast.Attribute) and ONLY_ON_LINUX.fullmatch(name := ast.unparse(node)):
        return name
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [*(alias.name for alias in node.names), getattr(node, "module", "") or ""]
        return "multiprocessing" if any(name.split(".")[0] == "multiprocessing" for name in names) else ""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
    if called in READERS and re.match(r"f?['\"]/(proc|sys)/", ast.unparse(first)):
        return ast.unparse(first)
    if called in STARTERS and isinstance(first, ast.List | ast.Tuple) and first.elts:
        program = first.elts[0]
        return str(program.value) if isinstance(program, ast.Constant) and program.value in PROGRAMS else ""
    return ""


@pytest.mark.parametrize("path", CONTROLLER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_controller_uses_nothing_that_only_linux_has(path: Path) -> None:
    assert list(uses(path)) == [], "ask for `sys.platform` in that function, and do something else on macOS"


@pytest.mark.parametrize(
    "line",
    [
        "os.sched_getaffinity(0)",
        "Path('/proc/uptime').read_text()",
        "open(f'/proc/{pid}/stat')",
        "subprocess.run(['timeout', '5', 'ls'])",
        "import multiprocessing",
        "from multiprocessing import Pool",
        "time.clock_gettime(time.CLOCK_BOOTTIME)",
    ],
)
def test_the_rule_finds(line: str) -> None:
    assert any(of_linux(node) for node in ast.walk(ast.parse(line)))


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process, as on macOS: its platform, and sysctl; ps -o lstart= is the same."""
    sysctl = tmp_path / "sysctl"
    sysctl.write_text('#!/bin/sh\n[ "$*" = "-n kern.bootsessionuuid" ] && echo 0F0E0D0C-1111-2222-3333-444455556666\n')
    sysctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.usefixtures("macos")
def test_a_dead_command_is_recognised_on_macos() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        start = holders._start_time(process.pid)
        me = holders.identity("repair").rsplit("/", 4)
        assert me[1] == "0F0E0D0C-1111-2222-3333-444455556666"
        other = "/".join([*me[:2], str(process.pid), start, me[4]])
        assert start
        assert "/" not in start
        assert not holders.dead_here(other)
        assert holders.dead_here(other.replace(start, "Thu-Jan-1-00:00:00-1970")), "another has its number"
        process.kill()
    assert holders.dead_here(other)


@pytest.mark.usefixtures("macos")
def test_a_boot_that_is_unknown_is_that_of_no_other_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sysctl").write_text("#!/bin/sh\nexit 1\n")
    me = holders.identity("repair").rsplit("/", 4)
    ended = "/".join([*me[:2], str(2**22 + 1), *me[3:]])
    assert holders.dead_here(ended)
    monkeypatch.setattr(holders, "_UNKNOWN_BOOT", "unknown-to-another-command")
    assert not holders.dead_here(ended)


@pytest.mark.usefixtures("macos")
def test_locks_have_a_clock_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    before = locks.clock()
    assert 0 <= locks.clock() - before < 60


@pytest.mark.usefixtures("macos")
def test_ansible_may_fork_on_macos(tmp_path: Path) -> None:
    assert runner.environment(tmp_path / "hosts.yml")["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] == "YES"


@pytest.mark.usefixtures("macos")
def test_ansible_starts_without_setpriv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Linux has it: there Ansible ends with a command that is killed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    script = runner._wrapper_folder(tmp_path / "wrapper") / "ansible-playbook"
    assert "pdeathsig" not in script.read_text()
    assert "exec " in script.read_text()
