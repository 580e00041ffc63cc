"""Run a playbook of gpunodes and pass on its events, typed; the only file that uses ansible-runner."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpunodes import settings
from gpunodes.engine import events
from gpunodes.engine.remote import openssh, targets
from gpunodes.inventory import Inventory, plugins
from gpunodes.inventory.snapshot import encoded
from gpunodes.model import Event, Machine, Role, printable_lines

if TYPE_CHECKING:
    from types import FrameType

FORKS = 50
"""Number of machines that Ansible works on in parallel."""
TASK_LIMIT_S = 7200
"""Seconds after which Ansible ends a task of a machine, which otherwise could stall all others for ever.

It is above the sum of the limits in each module: waits for locks (900 s), a package manager (3600 s), services, and
kubeadm (1200 s by default). Tasks that may take longer have their own ``timeout`` in the roles.
"""
_TASK_LIMIT = "ANSIBLE_TASK_TIMEOUT"
_LIMITS = (
    "gpunodes_drain_timeout",
    "gpunodes_gpu_reboot_timeout",
    "gpunodes_gpu_timeout",
    "gpunodes_kubeadm_limit",
    "gpunodes_ready_timeout",
)
"""The settings with which users raise the limits of modules."""
_LONGEST_S = 30 * 86400
_WAITS = 6
"""How often a module may wait as long as one of them: for each static pod, and to undo that."""
_PID = "pid"
_COPY = "listed"
"""The folder with the copy of a dynamic inventory, while Ansible runs."""
_STOP_S = 10.0
"""Seconds for Ansible to end its workers and their connections before it is killed."""


@dataclass(frozen=True, slots=True)
class Play:
    """One run of a playbook: its machines, phases and variables.

    ``variables`` are the settings of the user and of gpunodes for this run. ``facts`` are the results of host_facts by
    machine, ``cluster`` is a result of cluster_info (None: unknown). ``control`` is the control plane that the run uses
    ("": the first one). All of it is written to a file and must not hold secrets; none of it is ever evaluated as a
    template.
    """

    playbook: str
    inventory: Inventory
    machines: Sequence[str]
    skip_phases: Sequence[str] = ()
    variables: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    control: str = ""
    check: bool = False
    tags: Sequence[str] = ()
    """Run only tasks with one of these tags, and those that always run; empty for all."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of a playbook: Ansible's status, and the path of its output."""

    ok: bool
    interrupted: bool
    log: Path

    @property
    def error_text(self) -> str:
        """Ansible's first error, for a run that failed without a failed machine: an invalid playbook or variable."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        error = next((line for line in lines if re.match(r"\[?ERROR", line)), "")
        return re.sub(r"^\[?ERROR\]?:? *", "", error) or f"Ansible stopped; see {self.log}"


def run(
    play: Play, folder: Path, on_event: Callable[[Event], None], should_stop: Callable[[], bool] = lambda: False
) -> PlayResult:
    """Run ``play`` with its files under ``folder`` (a run's private folder); blocks until it should_stop.

    Ctrl-C and SIGTERM end Ansible, then this returns with ``interrupted``; a second one raises KeyboardInterrupt.
    ``should_stop`` is called once a second; when it returns True, Ansible ends in the same way.
    """
    import ansible_runner

    private = folder / Path(play.playbook).stem
    stop = _Stop(private / "bin" / _PID, should_stop)
    # A new folder for every run: ansible-runner does not overwrite the files of an earlier run in `env/`.
    private.mkdir(mode=0o700)

    verbose = settings.verbose()
    recorded = private / "artifacts" / "ansible" / "command"  # the caller's whole environment

    def handle(raw: Mapping[str, Any]) -> bool:
        recorded.unlink(missing_ok=True)
        if verbose and (output := str(raw.get("stdout") or "").replace("\r\n", "\n")):
            with contextlib.suppress(OSError):
                print(printable_lines(output), file=sys.stderr, flush=True)  # noqa: T201 - standard error, as it comes
        if event := events.parse(raw):
            on_event(event)
        return False  # do not save the event in a file: the log is enough

    with _removed(private / _COPY), stop:
        result = ansible_runner.run(
            private_data_dir=str(private),
            ident="ansible",
            playbook=str(settings.content() / "playbooks" / play.playbook),
            inventory=inventories(play.inventory, private),
            limit=",".join(play.machines),
            skip_tags=",".join(play.skip_phases) or None,
            tags=",".join(play.tags) or None,
            extravars=_extra_variables(play),
            cmdline="--check --diff" if play.check else None,
            envvars={
                **environment(play.inventory.path),
                _TASK_LIMIT: task_limit(play.inventory, play.machines, play.variables or {}),
                "PATH": os.pathsep.join([str(_wrapper_folder(private / "bin")), search_path()]),
                "ANSIBLE_NOCOLOR": "1",
                # ansible-runner drops a result above this size in bytes: a node takes about 500.
                "MAX_EVENT_RES": str(64 << 20),
            },
            event_handler=handle,
            cancel_callback=stop.overdue,
            settings={"pexpect_timeout": 1},
            quiet=True,
        )
    recorded.unlink(missing_ok=True)
    return PlayResult(ok=result.rc == 0, interrupted=stop.requested, log=recorded.with_name("stdout"))


def run_at_terminal(inventory: Inventory, playbook: Path, arguments: Sequence[str]) -> int:
    """Run a playbook with these arguments of ansible-playbook, as its user, at this terminal; returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="gpunodes-") as name:
        folder = Path(name)
        names = [machine.name for machine in inventory.machines(*Role)]
        variables = {**environment(inventory.path), _TASK_LIMIT: task_limit(inventory, names, {})}
        # A command that the playbook runs would take this variable for the user's: it is one of the inventory then.
        paths = inventories(inventory, folder, variables.pop("ANSIBLE_SSH_ARGS"))
        words = [word for path in paths for word in ("-i", path)]
        if inventory.plugin:
            # That command reads the inventory itself.
            given = json.dumps(encoded({"health_inventory": str(inventory.path.absolute())}))
            words += ["-e", given]
        programs = os.pathsep.join([str(_wrapper_folder(folder / "bin")), search_path()])
        argv = ["ansible-playbook", *words, str(playbook), *arguments]
        return _ended(argv, {**os.environ, **variables, "PATH": programs})


def _ended(argv: Sequence[str], variables: Mapping[str, str]) -> int:
    """Start a program and wait for its end; signals are for the program, which ends its own processes."""
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's signature
        if not started:
            early.append(number)
        # A terminal sends Ctrl-C to both, and a second one would interrupt Ansible's cleanup. A handler cannot tell it
        # from `kill -INT` of this process alone, which is lost in the foreground: `kill` without -INT is passed on.
        elif number != signal.SIGINT or not _in_foreground():
            started[0].send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # The program inherits what is ignored, as under nohup; a handler here would undo that.
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in handled}
    try:
        program = shutil.which(argv[0], path=variables["PATH"]) or argv[0]
        with subprocess.Popen([program, *argv[1:]], env=variables) as process:
            started.append(process)
            for number in early:
                process.send_signal(number)
            code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    """Whether the keys of a terminal send signals to this process, wherever its standard input comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False  # it was hung up
    finally:
        os.close(terminal)


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Remove ``folder`` at the end: a plugin may list passwords."""
    try:
        yield
    finally:
        # A static inventory has none. What cannot be removed here is removed with its run folder.
        shutil.rmtree(folder, ignore_errors=True)


def _extra_variables(play: Play) -> dict[str, Any]:
    """The extra variables of a play, encoded so that Ansible evaluates none of their strings as a template.

    By default ansible-core evaluates every string of an extra-vars file. A document from outside is passed as base64,
    which no version of Ansible can evaluate as a template or as one of its JSON markers; the filter
    gpunodes.bootstrap.data decodes it.
    """
    extra = {name: encoded(value) for name, value in (play.variables or {}).items()}
    if play.facts is not None:
        extra["gpunodes_facts"] = {name: _encoded(facts) for name, facts in play.facts.items()}
    if play.cluster is not None:
        extra["gpunodes_cluster"] = _encoded(play.cluster)
    if play.control:
        extra["gpunodes_control_plane"] = encoded(play.control)
    return extra


def _encoded(document: Any) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


def inventories(inventory: Inventory, private: Path, ssh_args: str = "") -> list[str]:
    """The inventory, and a second one with connection variables of machines with their own SSH rules.

    Of a dynamic inventory it is a copy: its plugin could list more in a play than what was checked. ``ssh_args`` are
    ssh's arguments for the other machines, "" if the environment has them.
    """
    paths = [str(inventory.copy(private / _COPY) if inventory.plugin else inventory.path.absolute())]
    own = _own_rules(inventory)
    if own or ssh_args:
        folder = private / "ssh"
        # host_vars of the first inventory override the second inventory's variables, but not its host_vars.
        (folder / "host_vars").mkdir(parents=True)
        for name, found in own.items():
            (folder / "host_vars" / f"{name}.json").write_text(json.dumps(encoded(found)), encoding="utf-8")
        variables = encoded({"ansible_ssh_args": ssh_args} if ssh_args else {})
        (folder / "hosts.json").write_text(json.dumps({"all": {"vars": variables}}), encoding="utf-8")
        paths.append(str(folder / "hosts.json"))
    return paths


def _own_rules(inventory: Inventory) -> dict[str, dict[str, str]]:
    """Ansible's connection variables of the machines for which ssh_config or the inventory sets SSH options."""
    has_rules = openssh.has_own_rules()

    def options(machine: Machine) -> tuple[str, dict[str, str]]:
        variables = inventory.connection(machine.name)
        own, common, extra = (targets.split(variables, name, machine.name) for name in targets.ARGUMENTS)
        if not has_rules and not (own or common or extra):
            return machine.name, {}
        argv = targets.ssh_argv(variables, machine.name)
        return machine.name, {
            "ansible_ssh_args": shlex.join(openssh.options(machine.address, argv, own)),
            "ansible_ssh_extra_args": shlex.join([*extra, *openssh.NOTHING_FORWARDED]),
        }

    with ThreadPoolExecutor() as pool:
        # Those of all roles: also a machine that only serves storage.
        return {name: found for name, found in pool.map(options, inventory.machines(*Role)) if found}


def _wrapper_folder(folder: Path) -> Path:
    """A folder with a wrapper for ansible-playbook, which is terminated when this process dies.

    Otherwise, after `kill -9` of the command, Ansible would continue beside the next run, and delete its join token.
    """
    folder.mkdir(mode=0o700)
    setpriv = shutil.which("setpriv")  # Linux only
    ansible = shutil.which("ansible-playbook", path=str(Path(sys.executable).parent))
    if ansible:
        prefix = f'"{setpriv}" --pdeathsig TERM -- ' if setpriv else ""
        script = folder / "ansible-playbook"
        script.write_text(f'#!/bin/sh\necho $$ >"{folder / _PID}"\nexec {prefix}"{ansible}" "$@"\n', encoding="utf-8")
        script.chmod(0o700)
    return folder


def search_path() -> str:
    """PATH with Ansible's programs first: under pipx or an unactivated environment they are not on the user's PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def environment(inventory: Path) -> dict[str, str]:
    """The environment variables that configure Ansible for the playbooks of gpunodes with this inventory."""
    content = settings.content()
    beside, sockets = plugins.search_path(inventory), settings.ssh_sockets()
    return {
        # The user's ansible.cfg applies to the user's playbooks only.
        "ANSIBLE_CONFIG": str(settings.ansible_config()),
        # The user's collections stay usable: an inventory may need a plugin of one.
        "ANSIBLE_COLLECTIONS_PATH": os.pathsep.join([str(content.parents[2]), _user_collections()]),
        "ANSIBLE_CALLBACKS_ENABLED": "gpunodes.bootstrap.printable",
        "ANSIBLE_ROLES_PATH": str(content / "roles"),
        "ANSIBLE_GATHERING": "explicit",
        # A module's result may contain "ansible_facts": they must not override the inventory's variables.
        "ANSIBLE_INJECT_FACT_VARS": "False",
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_FORKS": str(FORKS),
        # This limits the wait for sudo's prompt, too, which may be slow on a machine that swaps or compiles.
        "ANSIBLE_TIMEOUT": "120",
        _TASK_LIMIT: os.environ.get(_TASK_LIMIT) or str(TASK_LIMIT_S),
        "ANSIBLE_SSH_ARGS": shlex.join(openssh.options()),
        "ANSIBLE_SSH_CONTROL_PATH": "%(directory)s/%%C",
        **({"ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets)} if sockets else {}),
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_RETRY_FILES_ENABLED": "False",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        **({"ANSIBLE_INVENTORY_PLUGINS": beside} if beside else {}),
        # Ansible forks its workers. macOS kills a forked process in which a thread of the parent was using Objective-C.
        **({"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}),
    }


def task_limit(inventory: Inventory, machines: Iterable[str], more: Mapping[str, Any]) -> str:
    """Seconds for a task: as the user's environment has it, else enough for the limits that the settings set.

    ``more`` are settings that override those of the machines.
    """
    if own := os.environ.get(_TASK_LIMIT):
        return own
    longest = 0.0
    for name in machines:
        found = {**inventory.with_rendered(name, _LIMITS), **more}
        for key in _LIMITS:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                longest = max(longest, float(found[key]))
    return str(max(TASK_LIMIT_S, min(int(_WAITS * longest), _LONGEST_S)))


def _user_collections() -> str:
    """The user's path of collections, by default Ansible's own default."""
    return os.environ.get("ANSIBLE_COLLECTIONS_PATH") or "~/.ansible/collections:/usr/share/ansible/collections"


class _Stop:
    """While inside, SIGINT and SIGTERM make Ansible end; a second signal raises KeyboardInterrupt.

    ansible-runner would kill Ansible at once: its workers, which have their own sessions, would continue with their SSH
    connections and the commands on the machines.
    """

    def __init__(self, pid: Path, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._pid = pid
        self._should_stop = should_stop
        self._signalled = 0.0
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def overdue(self) -> bool:
        """Whether to kill Ansible, which did not end in time after SIGTERM; ansible-runner calls it every second."""
        self.requested = self.requested or self._should_stop()
        if not self.requested:
            return False
        if not self._signalled:
            self._signalled = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(self._pid.read_text(encoding="utf-8")), signal.SIGTERM)
        return time.monotonic() - self._signalled > _STOP_S

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's signature
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
