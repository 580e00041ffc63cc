"""Collectors: child processes that may be abandoned, because what they read blocks for ever where the driver hangs.

Each reports a fact as soon as it has it. The parent does nothing that could block.
"""

import contextlib
import json
import os
import select
import signal
import time
from typing import Any, Callable, Dict, Iterable, Tuple

from .options import Emit, ProbeOptions

Collect = Callable[[ProbeOptions, Emit], None]
"""Reads facts and reports each one as soon as it has it."""
COLLECTOR_BYTES = 8 << 20
"""Maximum output of one collector."""


class _Collector:
    """A child process that reports facts through a pipe, one JSON line each."""

    def __init__(self, name: str, collect: Collect, options: ProbeOptions, limit_s: float) -> None:
        self.name = name
        self.deadline = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.received = 0
        self._incomplete_line = b""
        self.descriptor, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(collect, options, writer)
        os.close(writer)

    def receive(self, facts: Dict[str, Any]) -> bool:
        """Store the facts that the child has written; False at the end of its output."""
        chunk = os.read(self.descriptor, 1 << 16)
        self.received += len(chunk)
        if self.received > COLLECTOR_BYTES:
            add_error(facts, self.name, "more than {} bytes; the rest is ignored".format(COLLECTOR_BYTES))
            return False
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        for line in lines:
            key, value = json.loads(line.decode("ascii"))
            _store(facts, key, value)
        return bool(chunk)

    def end(self, facts: Dict[str, Any], late: bool) -> None:
        """Kill the child's processes; report a child that cannot be killed."""
        os.close(self.descriptor)
        if late:
            add_error(facts, self.name, "did not finish within {:.0f} s".format(self.limit_s))
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    continue
            return
        add_error(facts, self.name, "process {} cannot be killed and is left behind".format(self.pid))


def _run_child(collect: Collect, options: ProbeOptions, writer: int) -> None:
    """Run a collector in the child process; never returns.

    It closes all inherited descriptors: the caller of the probe waits until its pipes are closed.
    """
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

        def emit(key: str, value: Any) -> None:
            data = json.dumps([key, value]).encode("ascii") + b"\n"
            while data:
                data = data[os.write(writer, data) :]

        try:
            collect(options, emit)
        except Exception as error:
            emit("errors", {"what": collect.__name__, "error": "{}: {}".format(type(error).__name__, error)})
        code = 0
    finally:
        os._exit(code)


def collect(
    facts: Dict[str, Any], options: ProbeOptions, collectors: Iterable[Tuple[str, Collect]], started: float
) -> None:
    """Run all collectors in parallel until they end or reach the deadline."""
    limit_s = max(1.0, options.deadline_s - (time.monotonic() - started) - 1.5)
    running: Dict[int, _Collector] = {}
    for name, function in collectors:
        collector = _Collector(name, function, options, limit_s)
        running[collector.descriptor] = collector
    while running:
        now = time.monotonic()
        for collector in [collector for collector in running.values() if collector.deadline <= now]:
            del running[collector.descriptor]
            collector.end(facts, late=True)
        if not running:
            break
        wait = max(0.0, min(collector.deadline for collector in running.values()) - now)
        for descriptor in select.select(list(running), [], [], wait)[0]:
            collector = running[descriptor]
            try:
                more = collector.receive(facts)
            except (ValueError, TypeError, KeyError) as error:
                add_error(facts, collector.name, "{}: {}".format(type(error).__name__, error))
                more = False
            if not more:
                del running[descriptor]
                collector.end(facts, late=False)


def _store(facts: Dict[str, Any], key: str, value: Any) -> None:
    """Store one fact: append it to a list, merge it into a mapping, set any other value."""
    present = facts.get(key)
    if isinstance(present, list):
        present.append(value)
    elif isinstance(present, dict):
        present.update(value)
    else:
        facts[key] = value


def add_error(facts: Dict[str, Any], what: str, error: str) -> None:
    facts["errors"].append({"what": what, "error": error})
