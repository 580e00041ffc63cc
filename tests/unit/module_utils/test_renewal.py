"""The renewal of a control plane's certificates: kubeadm, the kubelet and the runtime are those of the test.

Its certificates are real, and so are the TLS handshakes with what the static pods serve.
"""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import (
    certificates,
    containers,
    etcdctl,
    kube_api,
    kubeconfig,
    ledger,
    static_pod_files,
)
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.kubeadm import renewal, static_pods
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult


class Killed(BaseException):
    """The module was killed by SIGKILL here."""


class ControlPlane:
    """A machine whose kubelet follows the folder of manifests at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kubernetes = root / "kubernetes"
        self.manifests = self.kubernetes / "manifests"
        self.log: list[str] = []
        self.started: dict[str, tuple[str, float, bytes]] = {}
        """Each running pod: its container's id, its start, and the certificate that it read then."""
        self.days = 365.0
        self.broken = ""
        self.count = 0
        self.unready = 0
        """So many requests get the response that the API server on this machine is not ready."""
        self.kill_at = 0
        self.steps = 0

    def step(self, what: str) -> None:
        """Something that the module does to the machine; it is killed before the step ``kill_at``."""
        self.steps += 1
        if self.steps == self.kill_at:
            raise Killed
        self.log += [what] if what else []

    def issue(self) -> None:
        """What kubeadm writes: a new pair for each name, signed by nobody, which matters to no check here."""
        pki = self.kubernetes / "pki"
        (pki / "etcd").mkdir(parents=True, exist_ok=True)
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(pki / "new.key")]
        subprocess.run(
            ["openssl", "req", "-x509", *key, "-subj", "/CN=x", "-days", str(int(self.days)), "-out", str(pki / "new")],
            check=True,
            capture_output=True,
        )
        for name in certificates.RENEWABLE:
            shutil.copy(pki / "new", pki / name)
            shutil.copy(pki / "new.key", pki / f"{name[:-4]}.key")
        data = base64.b64encode((pki / "new").read_bytes()).decode()
        for name in certificates.KUBECONFIGS:
            (self.kubernetes / name).write_text(
                f"server: https://10.0.0.1:6443\ncertificate-authority-data: {data}\nclient-certificate-data: {data}\n"
            )
        now = time.time()
        for name in (*certificates.KUBECONFIGS, *(f"pki/{each}" for each in certificates.RENEWABLE)):
            os.utime(self.kubernetes / name, (now, now))

    def sync(self) -> None:
        """The kubelet: runs the pods whose manifests are there."""
        for name, (_, file) in {**dict.fromkeys(renewal.USES, (0, "")), **renewal._SERVED}.items():
            if not (self.manifests / f"{name}.yaml").exists():
                self.started.pop(name, None)
            elif name not in self.started and name != self.broken:
                self.count += 1
                served = (self.kubernetes / file).read_bytes() if file else b""
                self.started[name] = (f"{name}-{self.count}", time.time(), served)

    def client(self, config: kubeconfig.Kubeconfig, patience_s: float) -> Any:
        """The API client: that of 10.0.0.2, this machine, shows its state; the cluster's endpoint is always ready."""
        assert patience_s == 0
        return ApiClient(self, here=config.server == "https://10.0.0.2:6443")

    def ids(self, name: str, every: bool = False) -> list[str]:
        del every
        self.sync()
        return [self.started[name][0]] if name in self.started else []

    def crictl(self, argv: Sequence[str], *_: Any) -> CommandResult:
        began = next(began for id_, began, _ in self.started.values() if id_ == argv[1])
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began)) + f".{int(began % 1 * 1e9):09}Z"
        return CommandResult(argv, 0, f'{{"status": {{"startedAt": "{text}"}}}}', "")

    def run(self, argv: Sequence[str], *_: Any, **__: Any) -> CommandResult:
        self.step(" ".join(argv))
        self.issue()
        return CommandResult(argv, 0, "", "")

    def replace(self, source: str, target: str) -> None:
        # The ledger is written by a rename, too.
        moves = Path(target).parent.name in {"manifests", "gpunodes-manifests"}
        self.step(f"move {Path(source).name} {'away' if static_pods.AWAY in target else 'back'}" if moves else "")
        Path(source).rename(target)
        self.sync()


class ApiClient:
    def __init__(self, machine: ControlPlane, *, here: bool) -> None:
        self.machine, self.here = machine, here

    def get(self, path: str) -> None:
        assert path == "/readyz"
        if self.here and self.machine.unready:
            self.machine.unready -= 1
            raise ApiError(500, "poststarthook failed")

    def close(self) -> None:
        pass


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlane:
    made = ControlPlane(tmp_path)
    made.manifests.mkdir(parents=True)
    made.days = 20
    made.issue()
    # As if they had been made a month ago: nothing but time makes a certificate old.
    now = time.time()
    for name in certificates.AUTHORITIES:
        shutil.copy(made.kubernetes / "pki/new", made.kubernetes / "pki" / name)
        (made.kubernetes / "pki" / f"{name[:-4]}.key").write_text("")
    for name in renewal.USES:
        (made.manifests / f"{name}.yaml").write_text("    - --advertise-address=10.0.0.2\n")
    made.days = 365
    for path in made.kubernetes.rglob("*"):
        os.utime(path, (now - 1000, now - 1000))
    made.sync()
    monkeypatch.setattr(certificates, "KUBERNETES", str(made.kubernetes))
    monkeypatch.setattr(renewal, "_PKI", str(made.kubernetes / "pki"))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(made.kubernetes / "admin.conf"))
    monkeypatch.setattr(static_pod_files, "FOLDER", str(made.manifests))
    monkeypatch.setattr(static_pods, "AWAY", str(made.kubernetes / "gpunodes-manifests"))
    monkeypatch.setattr(static_pods, "_POLL_S", 0.001)
    monkeypatch.setattr(renewal, "_POLL_S", 0.001)
    monkeypatch.setattr(static_pods, "_healthy", lambda _: True)
    monkeypatch.setattr(etcdctl, "must", lambda _: "")
    monkeypatch.setattr(kube_api, "Client", made.client)
    monkeypatch.setattr(os, "replace", made.replace)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(containers, "ids", made.ids)
    monkeypatch.setattr(containers, "crictl", made.crictl)
    monkeypatch.setattr(renewal, "run", made.run)
    monkeypatch.setattr(
        renewal,
        "_handshake",
        lambda port: next(
            certificates.parse_pem(made.started[name][2].decode()).der
            for name, (each, _) in renewal._SERVED.items()
            if each == port
        ),
    )
    # Three of 20 days have passed, and each look at the clock takes a second.
    ticks = itertools.count(now + 3 * 86400)
    monkeypatch.setattr(time, "time", lambda: next(ticks))
    return made


def fresh(machine: ControlPlane) -> bool:
    """Whether all certificates are new, all pods run with them, and nothing is left of the run."""
    machine.sync()
    dates = {each["not_after"] for each in certificates.report() if each["renewal"] == "renew"}
    new = certificates.of_file(f"{machine.kubernetes}/pki/new")
    running = all(
        certificates.parse_pem(machine.started[name][2].decode()).not_after == max(dates) for name in renewal._SERVED
    )
    away = Path(static_pods.AWAY)
    return (
        new is not None
        and dates == {new.not_after}
        and set(machine.started) == set(renewal.USES)
        and running
        and not (away.exists() and list(away.iterdir()))
        and not ledger.load().manifests
    )


def renew(machine: ControlPlane, *, force: bool = False, check: bool = False) -> list[str]:
    assert machine
    return renewal.renew(force, 0.2, check).actions


def renew_ended(machine: ControlPlane) -> list[str]:
    assert machine
    return renewal.renew_ended(check=False).actions


def test_certificates_are_renewed_and_served(machine: ControlPlane) -> None:
    would = renew(machine, check=True)
    assert machine.log == []
    assert renew(machine) == would
    assert machine.log[0] == "kubeadm certs renew all"
    order = [line.split()[1].partition(".")[0] for line in machine.log if line.endswith("away")]
    assert order == ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
    # One at a time: each is back before the next one leaves.
    assert [line.split()[-1] for line in machine.log[1:]] == ["away", "back"] * 4
    assert fresh(machine)
    assert renew(machine) == []


def test_files_are_renewed_first_where_the_certificate_of_etcd_has_ended(
    machine: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it ends within the hour; before that nothing is done, and nothing is restarted in any case."""
    end, now = certificates.of_file(f"{machine.kubernetes}/pki/etcd/peer.crt"), [0.0]
    assert end
    monkeypatch.setattr(time, "time", lambda: now[0])
    now[0] = end.not_after - 7200
    assert renew_ended(machine) == []
    now[0] = end.not_after - 1800
    assert "renew etcd/peer.crt" in renew_ended(machine)
    assert machine.log == ["kubeadm certs renew all"]


def test_new_certificates_are_renewed_only_by_force(machine: ControlPlane) -> None:
    renew(machine)
    machine.log.clear()
    assert len(renew(machine, force=True)) == len(certificates.RENEWABLE) + len(certificates.KUBECONFIGS) + 4
    assert fresh(machine)


def test_all_that_uses_renewed_files_is_restarted(machine: ControlPlane) -> None:
    """kubeadm renews all of them, although one alone was due: the clock is three days ahead of its one day."""
    renew(machine)
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(machine.kubernetes / "pki/apiserver.key")]
    old = str(machine.kubernetes / "pki/apiserver.crt")
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-subj", "/CN=x", "-days", "1", "-out", old], check=True, capture_output=True
    )
    machine.log.clear()
    assert {"renew apiserver.crt", *(f"restart {name}" for name in renewal.USES)} == set(renew(machine))
    assert fresh(machine)
    assert renew(machine) == []


def test_a_kill_at_any_step_is_healed_by_the_next_run(machine: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every step that changes the machine: killed before it, then run again."""
    monkeypatch.setattr(static_pods, "_back", _unfinished(static_pods._back, machine))
    for step in range(1, 19):
        machine.days, machine.kill_at, machine.steps = 20, 0, 0
        machine.issue()
        machine.days = 365
        machine.kill_at = step
        try:
            renew(machine)
        except Killed:
            assert ledger.load().manifests or set(machine.started) == set(renewal.USES)
        machine.kill_at, machine.steps = 0, 0
        renew(machine)
        assert fresh(machine), f"killed before step {step}"


def _unfinished(back: Any, machine: ControlPlane) -> Any:
    """A killed process runs no ``finally``."""

    def called(*arguments: Any) -> None:
        if not machine.kill_at or machine.steps < machine.kill_at:
            back(*arguments)

    return called


def test_a_pod_that_does_not_come_back_is_a_problem_and_its_manifest_is_back(machine: ControlPlane) -> None:
    machine.broken = "kube-apiserver"
    with pytest.raises(MachineProblem, match="kube-apiserver is not ready after its restart"):
        renew(machine)
    assert (machine.manifests / "kube-apiserver.yaml").exists()
    assert "kube-scheduler" in machine.started, "the others were not touched"
    machine.broken = ""
    renew(machine)
    assert fresh(machine)


def test_an_old_certificate_that_is_still_served_is_a_problem(
    machine: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "_handshake", lambda _: b"old")
    with pytest.raises(MachineProblem, match=r"etcd does not serve the certificate .*/server.crt on port 2379"):
        renew(machine)


def test_the_api_server_of_this_machine_must_be_ready_not_that_behind_the_endpoint(machine: ControlPlane) -> None:
    machine.unready = 1_000_000
    with pytest.raises(MachineProblem, match="kube-apiserver is not ready after its restart"):
        renew(machine)
    machine.unready = 3
    renew(machine)
    assert machine.unready == 0
    assert fresh(machine)


def test_an_api_server_that_an_earlier_run_left_starting_must_get_ready(machine: ControlPlane) -> None:
    renew(machine)
    machine.unready = 1_000_000
    with pytest.raises(MachineProblem, match="kube-apiserver is not ready on port 6443"):
        renew(machine)


def test_a_first_handshake_that_fails_is_no_verdict(machine: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine one connection may take longer than its limit."""
    handshake, slow = renewal._handshake, iter([None, None])
    monkeypatch.setattr(renewal, "_handshake", lambda port: next(slow, handshake(port)))
    renew(machine)
    assert fresh(machine)


def test_an_authority_that_has_ended_is_never_renewed(machine: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100 * 86400)
    for each in (renew, renew_ended):
        with pytest.raises(MachineProblem, match=r"the certificate authority .*/pki/ca.crt has ended"):
            each(machine)
    assert machine.log == []


def test_an_authority_without_its_key_is_refused(machine: ControlPlane) -> None:
    (machine.kubernetes / "pki/etcd/ca.key").unlink()
    with pytest.raises(MachineProblem, match="is not on this machine"):
        renew(machine)
    assert machine.log == []


def test_a_worker_is_refused(machine: ControlPlane) -> None:
    (machine.kubernetes / "admin.conf").unlink()
    with pytest.raises(MachineProblem, match="no control plane"):
        renew(machine)


def test_a_control_plane_that_a_restore_stopped_is_refused(machine: ControlPlane) -> None:
    ledger.Ledger(etcd_restore={"state": "stopped"}, manifests={"etcd": "x"}).save()
    for each in (renew, renew_ended):
        with pytest.raises(MachineProblem, match="a restore of etcd has stopped"):
            each(machine)
    assert machine.log == []


def test_a_failing_kubeadm_is_a_problem(machine: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "run", lambda argv, *_, **__: CommandResult(argv, 1, "", "error: no CA\n"))
    with pytest.raises(MachineProblem, match="failed: error: no CA"):
        renew(machine)
    assert set(machine.started) == set(renewal.USES)


def test_a_newer_manifest_is_not_replaced(machine: ControlPlane) -> None:
    """kubeadm wrote one while the old one was away."""
    Path(static_pods.AWAY).mkdir()
    (Path(static_pods.AWAY) / "etcd.yaml").write_text("old")
    static_pods.heal(found := ledger.Ledger(manifests={"etcd": "x"}))
    assert (machine.manifests / "etcd.yaml").read_text() != "old"
    assert found.manifests == {}
    assert not list(Path(static_pods.AWAY).iterdir())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A TLS server on loopback that demands a client's certificate, as etcd does."""
    made = ControlPlane(tmp_path)
    made.issue()
    pki = made.kubernetes / "pki"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "etcd/server.crt", pki / "etcd/server.key")
    context.load_verify_locations(pki / "new")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as connection:
                connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], pki


def test_the_handshake_shows_the_certificate_that_is_served(
    served: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pki = served
    monkeypatch.setattr(renewal, "_PKI", str(pki))
    found = certificates.of_file(str(pki / "etcd/server.crt"))
    assert found
    assert renewal._handshake(port) == found.der


def test_no_server_is_no_certificate() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert renewal._handshake(probe.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T01:00:00.5Z", 3600.5),
        ("1970-01-01T03:30:00+02:30", 3600.0),
        ("yesterday", None),
    ],
)
def test_the_start_of_a_container_is_read(text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    out = f'{{"status": {{"startedAt": "{text}"}}}}'
    monkeypatch.setattr(containers, "crictl", lambda argv: CommandResult(argv, 0, out, ""))
    assert renewal._started("id") == seconds
