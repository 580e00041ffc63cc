"""The renewal on three control planes, with real members of etcd that accept each other by their certificates only."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from gpunodes.ansible.module_utils import (
    certificates,
    containers,
    etcd,
    etcdctl,
    kubeconfig,
    ledger,
    static_pod_files,
)
from gpunodes.ansible.module_utils.kubeadm import renewal, static_pods
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

from tests.programs import ending
from tests.unit.etcd_member import Member, free_port, needs_etcd, programs

pytestmark = [pytest.mark.long, needs_etcd]
YEAR = 365 * 86400
_PATIENCE_S = 90


class Authority:
    """Signs certificates for loopback."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pem = self._signed("etcd-ca", self.key, YEAR, ca=True)

    def issue(self, path: Path, seconds: float) -> None:
        """Write a certificate that ends in so many seconds, and its key beside it."""
        key = ec.generate_private_key(ec.SECP256R1())
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path.with_suffix(".key").write_bytes(key.private_bytes(*form))
        path.write_bytes(self._signed("x", key, seconds))

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, seconds: float, *, ca: bool = False) -> bytes:
        now = dt.datetime.now(dt.UTC)
        hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd-ca")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(seconds=seconds))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        )
        return built.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Machine:
    """A control plane that runs nothing but etcd; its kubelet follows the folder of manifests when it is asked."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder, self.authority = folder, authority
        self.member, self.peer = Member(folder, free_port()), free_port()
        self.pki = folder / "kubernetes/pki"
        self.process: subprocess.Popen[bytes] | None = None
        self.starts, self.began = 0, 0.0
        (self.pki / "etcd").mkdir(parents=True)
        (folder / "manifests").mkdir()
        for name in ("ca", "etcd/ca"):
            (self.pki / f"{name}.crt").write_bytes(authority.pem)
            (self.pki / f"{name}.key").write_text("")
        (folder / "admin.conf").write_text("")
        (folder / "manifests/etcd.yaml").write_text("")

    def issue(self, seconds: float = YEAR) -> None:
        """What `kubeadm certs renew` writes."""
        for name in ("server", "peer", "healthcheck-client"):
            self.authority.issue(self.pki / f"etcd/{name}.crt", seconds)

    def argv(self, cluster: str) -> list[str]:
        """etcd as kubeadm runs it."""
        found = programs()
        assert found
        client, peer, pki = f"https://127.0.0.1:{self.member.port}", f"https://127.0.0.1:{self.peer}", self.pki / "etcd"
        return [
            *(str(found / "server"), f"--name={self.folder.name}", f"--data-dir={self.folder}/data"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}", "--unsafe-no-fsync=true"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={cluster}"),
            *(f"--cert-file={pki}/server.crt", f"--key-file={pki}/server.key", "--client-cert-auth"),
            *(f"--peer-cert-file={pki}/peer.crt", f"--peer-key-file={pki}/peer.key", "--peer-client-cert-auth"),
            *(f"--trusted-ca-file={pki}/ca.crt", f"--peer-trusted-ca-file={pki}/ca.crt", "--log-level=error"),
            *("--heartbeat-interval=500", "--election-timeout=5000"),
        ]

    def stop(self) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait(30)
            self.process = None


class Cluster:
    """Control planes; ``at`` makes this process one of them, as a module that runs there."""

    def __init__(self, folder: Path, count: int) -> None:
        authority = Authority()
        self.machines = [Machine(folder / f"control-{number + 1}", authority) for number in range(count)]
        self.names = ",".join(f"{each.folder.name}=https://127.0.0.1:{each.peer}" for each in self.machines)

    def sync(self, machine: Machine) -> list[str]:
        """The kubelet; returns the ids of running containers."""
        wanted = (machine.folder / "manifests/etcd.yaml").exists()
        if not wanted:
            machine.stop()
        elif machine.process is None:
            machine.starts += 1
            with (machine.folder / "log").open("ab") as log:
                machine.process = subprocess.Popen(ending(machine.argv(self.names)), stdout=log, stderr=log)
            machine.began = time.time()
        return [f"{machine.starts:08x}"] if machine.process else []

    @contextlib.contextmanager
    def at(self, machine: Machine) -> Iterator[None]:
        def crictl(argv: Sequence[str]) -> CommandResult:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(machine.began)) + f".{machine.began % 1 * 1e9:09.0f}Z"
            return CommandResult(argv, 0, f'{{"status": {{"startedAt": "{text}"}}}}', "")

        def run(argv: Sequence[str], *_: Any, **__: Any) -> CommandResult:
            machine.issue()
            return CommandResult(argv, 0, "", "")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certificates, "KUBERNETES", str(machine.folder / "kubernetes"))
            patch.setattr(renewal, "_PKI", str(machine.pki))
            patch.setattr(renewal, "_SERVED", {"etcd": (machine.member.port, "pki/etcd/server.crt")})
            patch.setattr(renewal, "run", run)
            patch.setattr(kubeconfig, "ADMIN", str(machine.folder / "admin.conf"))
            patch.setattr(static_pod_files, "FOLDER", str(machine.folder / "manifests"))
            patch.setattr(static_pods, "AWAY", str(machine.folder / "away"))
            patch.setattr(ledger, "PATH", str(machine.folder / "ledger/ledger.json"))
            patch.setattr(etcdctl, "PKI", str(machine.pki / "etcd"))
            patch.setattr(containers, "ids", lambda *_: self.sync(machine))
            patch.setattr(containers, "crictl", crictl)
            patch.setattr(containers, "execute", machine.member.execute)
            yield

    def renew_ended(self, machine: Machine, *, check: bool = False) -> list[str]:
        with self.at(machine):
            return renewal.renew_ended(check).actions

    def renew(self, machine: Machine, limit_s: float = _PATIENCE_S, *, force: bool = False) -> list[str]:
        with self.at(machine):
            return renewal.renew(all_of_them=force, limit_s=limit_s, check=False).actions

    def working(self) -> int:
        """How many members work, as the first one sees it; 0 without a quorum."""
        with self.at(self.machines[0]), contextlib.suppress(MachineProblem):
            return len(etcd.healthy(etcd.members()))
        return 0

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self.working() != count:
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def end(self) -> None:
        """The certificates end on all machines, and members are started again: no connection of before is left."""
        for machine in self.machines:
            machine.issue(-3600)
            machine.stop()
            self.sync(machine)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 3)
    try:
        for machine in made.machines:
            machine.issue()
            made.sync(machine)
        made.wait(3)
        yield made
    finally:
        for machine in made.machines:
            machine.stop()


def test_certificates_that_have_ended_on_all_control_planes_are_renewed(cluster: Cluster) -> None:
    """One after the other alone never got past the first one; a run that was killed there is continued."""
    cluster.end()
    first = cluster.machines[0]
    with pytest.raises(MachineProblem, match="the static pod etcd is not ready after its restart"):
        cluster.renew(first, 8)
    assert cluster.working() == 0
    assert [bool(cluster.renew_ended(each, check=True)) for each in cluster.machines] == [False, True, True]
    starts = [each.starts for each in cluster.machines]
    assert [bool(cluster.renew_ended(each)) for each in cluster.machines] == [False, True, True]
    # Running members take the new files: nobody was restarted.
    cluster.wait(3)
    assert [each.starts for each in cluster.machines] == starts
    assert [cluster.renew(each) for each in cluster.machines] == [[], ["restart etcd"], ["restart etcd"]]
    cluster.wait(3)
    assert [cluster.renew_ended(each) + cluster.renew(each) for each in cluster.machines] == [[], [], []]


def test_the_last_members_of_a_quorum_are_not_restarted_unless_their_certificates_end_soon(cluster: Cluster) -> None:
    """One of three is off: the restart of a second one stops the cluster, if only for seconds."""
    first, *_, off = cluster.machines
    (off.folder / "manifests/etcd.yaml").unlink()
    cluster.sync(off)
    cluster.wait(2)
    before = (first.pki / "etcd/peer.crt").read_bytes()
    with pytest.raises(MachineProblem, match=r"etcd does not work on control-3 \(127\.0\.0\.1\)"):
        cluster.renew(first, force=True)
    assert (first.pki / "etcd/peer.crt").read_bytes() == before
    # Nor by a run that only restarts what an earlier one renewed.
    first.issue()
    with pytest.raises(MachineProblem, match=r"etcd does not work on control-3 \(127\.0\.0\.1\)"):
        cluster.renew(first)
    first.issue((certificates.SOON_DAYS - 1) * 86400)
    assert "restart etcd" in cluster.renew(first, force=True)
    cluster.wait(2)
    (off.folder / "manifests/etcd.yaml").write_text("")
    cluster.sync(off)
    cluster.wait(3)
    assert "restart etcd" in cluster.renew(first, force=True)


def test_valid_certificates_are_renewed_one_machine_at_a_time_only(cluster: Cluster) -> None:
    for machine in cluster.machines:
        machine.issue(2 * 86400)
    assert [cluster.renew_ended(each) for each in cluster.machines] == [[], [], []]
