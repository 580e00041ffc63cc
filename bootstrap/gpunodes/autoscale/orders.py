"""Orders to machines in threads of their own: one at a time for each machine, and when one that failed is repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpunodes.engine.power import PowerProblem


class Orders:
    """Runs ``carry_out``, which must not raise, with a machine's name, and whether its order is repeated.

    Of different machines, ``at_once`` are carried out at the same time. All methods may be called from any thread.
    """

    def __init__(self, carry_out: Callable[[str, bool], None], again_s: float, at_once: int = 16) -> None:
        self._carry_out = carry_out
        self._again_s = again_s
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="order")
        self._mutex = threading.Lock()
        self._busy: set[str] = set()
        self._waiting: set[str] = set()
        """Machines that got an order while the last one was ending."""
        self._ended: dict[str, float] = {}
        """When the last order of a machine ended, by the monotonic clock."""
        self._failures: dict[str, str] = {}
        """The kind of error with which the last order of a machine failed."""
        self._postponed: set[str] = set()
        """Machines whose order is due again as soon as this attempt has ended."""

    def give(self, name: str, *, again: bool = False) -> None:
        """Carry out the order of a machine now, or after the one that is carried out at present."""
        with self._mutex:
            if not again:
                self._ended.pop(name, None)
            if name in self._busy:
                self._waiting.add(name)
                return
            self._busy.add(name)
        self._threads.submit(self._run, name, again)

    def is_due(self, name: str, *, once: bool) -> bool:
        """Whether an order that is not carried out at present is to be repeated; ``once``: not if it ever ended."""
        with self._mutex:
            ended = self._ended.get(name)
            if name in self._busy or ended is None:
                return name not in self._busy
            return not once and time.monotonic() - ended >= self._again_s

    def failed(self, name: str, error: Exception, *, known: bool) -> bool:
        """Remember the failure of an order; whether it is another one than that of the attempt before.

        Kinds of errors are compared, not their texts: those of BMCs and programs may differ each time. ``known``: the
        attempt before failed, too, of which this may know nothing: it was that of an earlier server.
        """
        kind = error.trouble.value if isinstance(error, PowerProblem) else type(error).__name__
        with self._mutex:
            before, self._failures[name] = self._failures.get(name, ""), kind
        return kind != before if before else not known

    def postpone(self, name: str) -> None:
        """Count the attempt that is carried out now as none: the order is due at once."""
        with self._mutex:
            self._postponed.add(name)

    def succeeded(self, name: str) -> None:
        """Forget the failures of a machine's orders."""
        with self._mutex:
            self._failures.pop(name, None)

    def _run(self, name: str, again: bool) -> None:
        try:
            self._carry_out(name, again)
        finally:
            with self._mutex:
                waits = name in self._waiting
                self._waiting.discard(name)
                if not waits:
                    self._busy.discard(name)
                    self._ended[name] = time.monotonic()
                    if name in self._postponed:
                        del self._ended[name]
                self._postponed.discard(name)
            if waits:
                self._threads.submit(self._run, name, False)
