"""How long something does not respond while a test breaks or changes it: requests at a fixed pace, and the gaps.

Standard library only. The requests run in a thread of their own, from this host, which is in the lab's network.

    with availability.watched("https://10.213.0.10:6443/readyz") as prober:
        operator.lab("power", "cp-1", "off")
        prober.wait_for_success()
    assert prober.report().longest_gap_s < 30
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

INTERVAL_S = 0.2
"""Between the starts of two requests; a slower response delays the next request."""
TIMEOUT_S = 2.0
"""Of one request; emulated machines under load need more than a second."""
SLOW_S = 10.0
"""The same while others start: an emulated machine, or its API server, answers slowly then."""
LIMIT = 36000
"""Requests of one prober at most: two hours at this pace."""
OK = range(200, 300)


@dataclass(frozen=True, slots=True)
class Probe:
    """One request: when it began, seconds from the prober's start, and why it failed."""

    start_s: float
    end_s: float
    failure: str
    """Empty: it succeeded."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a successful response: from the end of the last success to the end of the next one."""

    start_s: float
    end_s: float
    failures: tuple[str, ...]
    """Of its requests, without repetitions."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Availability:
    """The result of all requests."""

    requests: int
    failed: int
    gaps: tuple[Gap, ...]
    """In order; the last one is open if the last request failed, and ends with it."""

    @property
    def longest_gap_s(self) -> float:
        """Seconds of the longest gap; 0 without a failed request."""
        return max((gap.seconds for gap in self.gaps), default=0.0)


def summarize(probes: Sequence[Probe]) -> Availability:
    """The gaps between successful requests. Before the first success a gap begins with the first request."""
    gaps: list[Gap] = []
    last_success = probes[0].start_s if probes else 0.0
    failures: list[str] = []
    for probe in probes:
        if probe.failure:
            failures.append(probe.failure)
            continue
        if failures:
            gaps.append(Gap(last_success, probe.end_s, tuple(dict.fromkeys(failures))))
        last_success, failures = probe.end_s, []
    if failures:
        gaps.append(Gap(last_success, probes[-1].end_s, tuple(dict.fromkeys(failures))))
    return Availability(len(probes), sum(bool(probe.failure) for probe in probes), tuple(gaps))


@dataclass(slots=True)
class Prober:
    """Requests a URL until it is stopped, or ``limit`` times. Every response in 200 to 299 is a success."""

    url: str
    interval_s: float = INTERVAL_S
    timeout_s: float = TIMEOUT_S
    limit: int = LIMIT
    _probes: list[Probe] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self) -> None:
        """Send the requests, each over a new connection: a kept one would hide that the address has moved."""
        opener, begin = _opener(), time.monotonic()
        for _ in range(self.limit):
            start = time.monotonic()
            failure = _failure(opener, self.url, self.timeout_s)
            with self._changed:
                self._probes.append(Probe(start - begin, time.monotonic() - begin, failure))
                self._changed.notify_all()
            if self._stopped.wait(max(0.0, start + self.interval_s - time.monotonic())):
                return

    def stop(self) -> None:
        """Send no further request."""
        self._stopped.set()

    def wait_for_success(self, limit_s: float = 120.0) -> None:
        """Wait until a request that begins from now on succeeds; fails the test after ``limit_s`` seconds."""
        self._wait(failed=False, limit_s=limit_s)

    def wait_for_failure(self, limit_s: float = 120.0) -> None:
        """Wait until a request that begins from now on fails; fails the test after ``limit_s`` seconds."""
        self._wait(failed=True, limit_s=limit_s)

    def _wait(self, *, failed: bool, limit_s: float) -> None:
        with self._changed:
            # The request in progress began before now.
            first = len(self._probes) + 1
            found = self._changed.wait_for(
                lambda: any(bool(probe.failure) is failed for probe in self._probes[first:]), limit_s
            )
            assert found, f"no {'failed' if failed else 'successful'} request of {self.url}: {self._probes[-3:]}"

    def report(self) -> Availability:
        """The availability until now."""
        with self._changed:
            return summarize(self._probes)


@contextmanager
def watched(
    url: str, interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S, limit: int = LIMIT
) -> Iterator[Prober]:
    """Request ``url`` in the background during the context; prints the result at its end."""
    prober = Prober(url, interval_s, timeout_s, limit)
    thread = threading.Thread(target=prober.run, name=f"probe {url}", daemon=True)
    thread.start()
    try:
        yield prober
    finally:
        prober.stop()
        thread.join(timeout_s + 10)
        found = prober.report()
        print(f"{url}: {found.failed} of {found.requests} requests failed, longest gap {found.longest_gap_s:.1f} s")


def _opener() -> OpenerDirector:
    # The machines' certificates are of the cluster's own authority; a proxy of the user must not be used for the lab.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return build_opener(ProxyHandler({}), HTTPHandler(), HTTPSHandler(context=context))


def _failure(opener: OpenerDirector, url: str, timeout_s: float) -> str:
    """Why a request failed; empty if it succeeded."""
    request = Request(url, headers={"Connection": "close"})  # noqa: S310 - the test's own URL
    try:
        with opener.open(request, timeout=timeout_s) as response:
            response.read(4096)
            status = response.status
    except HTTPError as error:
        error.close()
        status = error.code
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return "" if status in OK else f"status {status}"
