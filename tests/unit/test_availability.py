"""The prober of the machine tests, with servers on the loopback interface that fail in the ways of real ones."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tests.machines import availability
from tests.machines.availability import Gap, Probe, Prober, summarize, watched


class Handler(BaseHTTPRequestHandler):
    """Responds with ``status``."""

    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(Handler.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Nothing: the requests are too many."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.status = 200
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/readyz"
        serving.shutdown()
        thread.join()


def test_gaps_last_from_success_to_success() -> None:
    probes = [Probe(0, 0.1, ""), Probe(0.2, 0.3, "refused"), Probe(0.4, 2.4, "timed out"), Probe(2.4, 2.5, "refused")]
    open_end = summarize(probes)
    assert (open_end.requests, open_end.failed) == (4, 3)
    assert open_end.gaps == (Gap(0.1, 2.5, ("refused", "timed out")),)
    ended = summarize([*probes, Probe(2.6, 2.7, ""), Probe(2.8, 2.9, ""), Probe(3.0, 3.1, "status 500")])
    assert [(gap.start_s, gap.end_s) for gap in ended.gaps] == [(0.1, 2.7), (2.9, 3.1)]
    assert ended.longest_gap_s == pytest.approx(2.6)


def test_a_gap_before_the_first_success_counts() -> None:
    assert summarize([Probe(0, 1, "refused"), Probe(1, 3, "")]).longest_gap_s == 3


def test_without_requests_and_without_failures_there_is_no_gap() -> None:
    assert summarize([]).longest_gap_s == 0
    assert summarize([Probe(0, 9, ""), Probe(9, 10, "")]).gaps == ()


def test_a_failure_and_the_recovery_are_seen(server: str) -> None:
    with watched(server, interval_s=0.01) as prober:
        prober.wait_for_success(10)
        Handler.status = 500
        prober.wait_for_failure(10)
        Handler.status = 200
        prober.wait_for_success(10)
    found = prober.report()
    assert 0 < found.failed < found.requests
    assert found.gaps[0].failures == ("status 500",)
    # It has ended.
    assert prober.report() == found


def test_a_port_without_a_server_is_a_failure_of_every_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        prober = Prober(f"https://127.0.0.1:{unused.getsockname()[1]}/readyz", interval_s=0, limit=3)
        prober.run()
    found = prober.report()
    assert (found.requests, found.failed) == (3, 3)
    assert "refused" in found.gaps[0].failures[0]


def test_a_server_that_accepts_and_says_nothing_is_a_gap_and_not_a_hang() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        prober = Prober(f"http://127.0.0.1:{silent.getsockname()[1]}/", interval_s=0, timeout_s=0.1, limit=2)
        prober.run()
    found = prober.report()
    assert found.failed == 2
    assert found.longest_gap_s >= 0.2


def test_the_number_of_requests_is_bounded(server: str) -> None:
    prober = Prober(server, interval_s=0, limit=5)
    prober.run()
    assert prober.report() == availability.Availability(5, 0, ())


def test_the_pace_does_not_add_up(server: str) -> None:
    """Requests begin every interval, whatever they take."""
    prober = Prober(server, interval_s=0.05, limit=4)
    prober.run()
    starts = [probe.start_s for probe in prober._probes]
    assert all(later - earlier >= 0.049 for earlier, later in itertools.pairwise(starts))


def test_waiting_fails_the_test_instead_of_waiting_for_ever(server: str) -> None:
    with watched(server, interval_s=0.01) as prober, pytest.raises(AssertionError, match="no failed request"):
        prober.wait_for_failure(0.2)


def test_a_proxy_of_the_user_is_not_used(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    prober = Prober(server, interval_s=0, limit=1)
    prober.run()
    assert prober.report().failed == 0
