"""The only file that knows ansible-runner: runs one of our playbooks and hands its events on, typed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gpunodes import settings
from gpunodes.engine import events, openssh, targets
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Machine, printable_lines

if TYPE_CHECKING:
    from types import FrameType

FORKS = 50
"""How many machines Ansible works on at once."""
_PID = "pid"
_PATIENCE_S = 10.0
"""Seconds that Ansible gets to end its workers, which end their connections, before it is killed."""


@dataclass(frozen=True, slots=True)
class Play:
    """One run of a playbook: on which machines, which phases, with which variables.

    ``variables`` are the user's settings for this run, and ours. ``facts`` is what machines reported, by machine
    (results of host_facts), ``cluster`` what the cluster reported (a result of cluster_info; None: unknown). All of it
    goes through a file and must hold no secret; none of it is ever a template.
    """

    playbook: str
    inventory: Path
    machines: Sequence[str]
    skip_phases: Sequence[str] = ()
    only_phases: Sequence[str] = ()
    variables: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    check: bool = False


@dataclass(frozen=True, slots=True)
class PlayResult:
    """How a playbook ended: Ansible's own status, and where its output lies."""

    ok: bool
    interrupted: bool
    log: Path

    @property
    def error_text(self) -> str:
        """Ansible's own first error, for a run that failed on no machine: a broken playbook or variable."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        found = next((line for line in lines if re.match(r"\[?ERROR", line)), "")
        return re.sub(r"^\[?ERROR\]?:? *", "", found) or f"Ansible stopped; see {self.log}"


def run(
    play: Play, folder: Path, on_event: Callable[[Event], None], ends: Callable[[], bool] = lambda: False
) -> PlayResult:
    """Run ``play`` with its files under ``folder`` (a run's private folder); blocks until it ends.

    Ctrl-C and SIGTERM end Ansible, then this returns with ``interrupted``; a second one raises KeyboardInterrupt.
    ``ends`` is asked once a second whether it is to end in the same way.
    """
    import ansible_runner

    private = folder / Path(play.playbook).stem
    stop = _Stop(private / "bin" / _PID, ends)
    # A fresh folder for every run: ansible-runner does not overwrite what an earlier one left in `env/`.
    private.mkdir(mode=0o700)
    # The user's own ansible.cfg is for the user's own playbooks.
    (private / "ansible.cfg").write_text(_CONFIG, encoding="utf-8")

    verbose = settings.verbose()

    def handle(raw: Mapping[str, Any]) -> bool:
        if verbose and (output := str(raw.get("stdout") or "").replace("\r\n", "\n")):
            with contextlib.suppress(OSError):
                print(printable_lines(output), file=sys.stderr, flush=True)  # noqa: T201 - standard error, as it comes
        if event := events.parse(raw):
            on_event(event)
        return False  # the event need not be kept as a file: the log holds what a reader needs

    with stop:
        result = ansible_runner.run(
            private_data_dir=str(private),
            ident="ansible",
            playbook=str(settings.content() / "playbooks" / play.playbook),
            inventory=_inventories(play, private),
            limit=",".join(play.machines),
            tags=",".join(play.only_phases) or None,
            skip_tags=",".join(play.skip_phases) or None,
            extravars=_extra_variables(play),
            cmdline="--check --diff" if play.check else None,
            envvars=_environment(_mortal(private / "bin")) | {"ANSIBLE_CONFIG": str(private / "ansible.cfg")},
            event_handler=handle,
            cancel_callback=stop.overdue,
            settings={"pexpect_timeout": 1},
            quiet=True,
        )
    artifacts = Path(result.config.artifact_dir)
    # This record of the command holds the caller's whole environment.
    (artifacts / "command").unlink(missing_ok=True)
    return PlayResult(ok=result.rc == 0, interrupted=stop.asked, log=artifacts / "stdout")


def _extra_variables(play: Play) -> dict[str, Any]:
    """The one door into a play: ansible-core takes every string of an extra-vars file for a template unless told.

    A document from outside goes in as one text in base64, which no version of Ansible can take for a template or for
    its own JSON markers, whatever it holds; the filter gpunodes_data opens it.
    """
    made = {name: _literal(value) for name, value in (play.variables or {}).items()}
    if play.facts is not None:
        made["gpunodes_facts"] = {name: _sealed(facts) for name, facts in play.facts.items()}
    if play.cluster is not None:
        made["gpunodes_cluster"] = _sealed(play.cluster)
    return made


def _sealed(document: Any) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


def _literal(value: Any) -> Any:
    """A setting with each of its strings marked as no template."""
    if isinstance(value, str):
        # Half a surrogate pair makes Ansible read the file as YAML, where the mark means nothing.
        return {"__ansible_unsafe": value.encode(errors="replace").decode()}
    if isinstance(value, Mapping):
        return {name: _literal(inner) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [_literal(inner) for inner in value]
    return value


# Ansible looks a thousand times a second whether a machine has answered: up to a fifth of a processor for as
# long as a run lasts; no environment variable sets it.
_CONFIG = "[defaults]\ninternal_poll_interval = 0.01\n"


def _inventories(play: Play, private: Path) -> list[str]:
    """The inventory, and one that holds what ssh_config, or the inventory, says of single machines' connections."""
    found = [str(play.inventory.absolute())]
    if own := _own_rules(Inventory(play.inventory)):
        folder = private / "ssh"
        # What the inventory has in its host_vars goes before another inventory, but not before that one's host_vars.
        (folder / "host_vars").mkdir(parents=True)
        for name, variables in own.items():
            (folder / "host_vars" / f"{name}.json").write_text(json.dumps(variables), encoding="utf-8")
        (folder / "hosts.json").write_text('{"all": {}}', encoding="utf-8")
        found.append(str(folder / "hosts.json"))
    return found


def _own_rules(inventory: Inventory) -> dict[str, dict[str, str]]:
    """Ansible's variables for the connections of those machines of which somebody says something."""
    for_all = openssh.has_own_rules()

    def options(machine: Machine) -> tuple[str, dict[str, str]]:
        variables = inventory.connection(machine.name)
        own, common, extra = (targets.split(variables, name, machine.name) for name in targets.ARGUMENTS)
        if not for_all and not (own or common or extra):
            return machine.name, {}
        words = targets.ssh_argv(variables, machine.name)
        return machine.name, {
            "ansible_ssh_args": shlex.join(openssh.options(machine.address, words, own)),
            "ansible_ssh_extra_args": shlex.join([*extra, *openssh.NOTHING_FORWARDED]),
        }

    with ThreadPoolExecutor() as pool:
        return {name: found for name, found in pool.map(options, inventory.machines()) if found}


def _mortal(folder: Path) -> Path:
    """A folder whose ansible-playbook dies with this process, however it dies.

    After `kill -9` of the command its Ansible would go on beside the next run, and delete that one's token.
    """
    folder.mkdir(mode=0o700)
    setpriv = shutil.which("setpriv")  # Linux only
    ansible = shutil.which("ansible-playbook", path=str(Path(sys.executable).parent))
    if ansible:
        dies = f'"{setpriv}" --pdeathsig TERM -- ' if setpriv else ""
        script = folder / "ansible-playbook"
        script.write_text(f'#!/bin/sh\necho $$ >"{folder / _PID}"\nexec {dies}"{ansible}" "$@"\n', encoding="utf-8")
        script.chmod(0o700)
    return folder


def _environment(programs: Path) -> dict[str, str]:
    plugins = settings.plugins()
    return {
        # Under pipx or an unactivated environment ansible-playbook is not on PATH.
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "ANSIBLE_LIBRARY": str(plugins / "modules"),
        "ANSIBLE_MODULE_UTILS": str(plugins / "module_utils"),
        "ANSIBLE_FILTER_PLUGINS": str(plugins / "filter_plugins"),
        "ANSIBLE_CALLBACK_PLUGINS": str(plugins / "callback_plugins"),
        "ANSIBLE_CALLBACKS_ENABLED": "gpunodes_printable",
        "ANSIBLE_ROLES_PATH": str(settings.content() / "roles"),
        "ANSIBLE_GATHERING": "explicit",
        # Any module's answer may bring "ansible_facts": they must not become variables above the inventory's.
        "ANSIBLE_INJECT_FACT_VARS": "False",
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_FORKS": str(FORKS),
        # This bounds the wait for sudo's first word as well: a machine that swaps or compiles may be slow to say it.
        "ANSIBLE_TIMEOUT": "120",
        "ANSIBLE_SSH_ARGS": shlex.join(openssh.options()),
        "ANSIBLE_SSH_CONTROL_PATH": "%(directory)s/%%C",
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_RETRY_FILES_ENABLED": "False",
        "ANSIBLE_NOCOLOR": "1",
        # Bytes of an answer above which ansible-runner passes none of it on: a node takes about 500.
        "MAX_EVENT_RES": str(64 << 20),
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
    }


class _Stop:
    """While inside, SIGINT and SIGTERM ask Ansible to end; the second one is Python's own again.

    ansible-runner would kill Ansible at once: its workers, in sessions of their own, and their SSH connections would
    live on, and so would what they started on the machines.
    """

    def __init__(self, pid: Path, ends: Callable[[], bool] = lambda: False) -> None:
        self._pid = pid
        self._ends = ends
        self._told = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self.asked = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def overdue(self) -> bool:
        """Whether Ansible was asked to end and had its time for it; ansible-runner's question, once a second."""
        self.asked = self.asked or self._ends()
        if not self.asked:
            return False
        if not self._told:
            self._told = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(self._pid.read_text(encoding="utf-8")), signal.SIGTERM)
        return time.monotonic() - self._told > _PATIENCE_S

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's signature
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
