"""Questions to BMCs about the power of machines. Nobody waits for answers: a BMC that hangs delays no other machine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from gpunodes.engine.power import PowerState
from gpunodes.errors import sentence

log = logging.getLogger(__name__)
_AT_ONCE = 16


class Questions:
    """Asks ``ask`` in threads about machines by their names, each at most once in ``again_s`` seconds."""

    def __init__(self, ask: Callable[[str], PowerState], again_s: float) -> None:
        self._ask = ask
        self._again_s = again_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="question")
        self._mutex = threading.Lock()
        self._open: set[str] = set()
        self._asked: dict[str, float] = {}
        """When a machine was last asked about, by the monotonic clock."""
        self._answers: dict[str, PowerState] = {}
        self._why: dict[str, str] = {}
        """Why a machine's last answer does not say whether it is on."""

    def answers(self, names: Collection[str]) -> dict[str, PowerState]:
        """The answers that came since the last call, each once; asks about those of ``names`` that are due."""
        now = time.monotonic()
        with self._mutex:
            found = {name: answer for name, answer in self._answers.items() if name in names}
            self._answers.clear()
            due = [
                name
                for name in names
                if name not in found
                and name not in self._open
                and now - self._asked.get(name, -self._again_s) >= self._again_s
            ]
            self._open.update(due)
            self._asked.update(dict.fromkeys(due, now))
        for name in due:
            self._threads.submit(self._answer, name)
        return found

    def why(self, name: str) -> str:
        """Why the last answer about a machine was unknown."""
        with self._mutex:
            return self._why.get(name, "")

    def _answer(self, name: str) -> None:
        answer, why = PowerState.UNKNOWN, "its BMC reports no power state"
        try:
            answer = self._ask(name)
        except Exception as error:  # one odd BMC must not end a thread without a word
            why = sentence(error)
            log.warning("%s: %s", name, why)
        finally:
            with self._mutex:
                self._answers[name], self._why[name] = answer, why
                self._open.discard(name)
