"""Commands use any control plane that responds: real sessions, SSH servers and lock programs on loopback addresses.

The API servers are stand-ins, over TLS, with one common state.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import command_lock, kube_api, kubeconfig
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import group_lock, locks
from gpunodes.engine.cluster import session as sessions
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import (
    NO_CLUSTER,
    NO_SESSION,
    OTHER_CLUSTER,
    Connection,
    Transport,
    here,
    over_ssh,
)
from gpunodes.engine.cluster.errors import NoCluster, NoResponse, NoSession, OtherCluster
from gpunodes.engine.cluster.pods import Pod
from gpunodes.engine.cluster.session import Session, is_sent_once
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.locks import NoLock, Taken
from gpunodes.engine.remote import commands, shell
from gpunodes.engine.remote.commands import Become, RemoteCommand

from tests import sshd
from tests.repair_fleet import Api

POD = Pod("default", "p1", "uid-p1", "ReplicaSet", mirror=False, finished=False, ending=False)
HANGS = ["sh", "-c", "exec sleep 60"]
REFUSES = ["sh", "-c", "echo 'ssh: connect to host c1 port 22: Connection refused' >&2; exit 255"]
GARBAGE = [
    sys.executable,
    "-c",
    f"import sys; print('\\n{MARK}', flush=True)\nfor line in sys.stdin: print('[[[' * 9, '\\x1b]0;', flush=True)",
]


def new_certificate(folder: Path, name: str) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, which is its own CA."""
    path = folder / f"{name}.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(path), "-out", str(folder / "cert")], check=True, capture_output=True)
    path.write_text((folder / "cert").read_text() + path.read_text())
    return path


class Server:
    """A stand-in API server of one control plane; ``api`` is the state of the cluster."""

    def __init__(self, folder: Path, api: Api, certificate: Path, name: str) -> None:
        self.requests: list[tuple[str, str]] = []
        self.mute = False
        """It carries requests out, and closes the connection without a response."""
        self._stopped = False
        self.status = 0
        """The status of all responses, if it is not 0."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                if server._stopped:
                    self.close_connection = True
                    return
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                server.requests.append((self.command, self.path))
                status, text = server.status, {"message": "etcdserver: request timed out"}
                if not status:
                    found = api.request(self.command, self.path, body)
                    status, text = found.status, found.body if found.status == 200 else {"message": found.error}
                if server.mute:
                    self.close_connection = True
                    return
                data = json.dumps(text).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - names of the base class

            def log_message(self, *_: Any) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._http.server_port}"
        self.kubeconfig = folder / f"{name}.conf"
        ca = base64.b64encode((certificate.read_text().partition("-----BEGIN PRIVATE")[0]).encode()).decode()
        self.kubeconfig.write_text(f"    certificate-authority-data: {ca}\n    server: {self.url}\n")
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # A busy test machine takes long to start a program.
    monkeypatch.setattr(sessions, "TURN_S", 40.0)
    found = Api()
    for name in ("c1", "c2", "c3", "w0"):
        found.add_node(name)
    found.add_pod("p1", "w0")
    return found


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The CA of the cluster, and that of another one."""
    folder = tmp_path_factory.mktemp("ca")
    return new_certificate(folder, "ours"), new_certificate(folder, "another")


@pytest.fixture
def servers(tmp_path: Path, api: Api, certificates: tuple[Path, Path]) -> Iterator[list[Server]]:
    """The API servers of three control planes."""
    found = [Server(tmp_path, api, certificates[0], name) for name in ("c1", "c2", "c3")]
    yield found
    for server in found:
        with contextlib.suppress(OSError):
            server.stop()


@contextlib.contextmanager
def session(*transports: Transport, **more: Any) -> Iterator[Session]:
    with contextlib.closing(Session(transports, **more)) as found:
        yield found


def local(server: Server, name: str) -> Transport:
    return here(sys.executable, server.kubeconfig, name)


def others(servers: Sequence[Server]) -> list[Transport]:
    return [local(server, f"c{number}") for number, server in enumerate(servers, 2)]


# The session


def test_a_repair_goes_on_when_the_api_of_its_control_plane_stops(servers: list[Server], api: Api) -> None:
    """Its Lease stays, and is renewed over another control plane."""
    with session(*(local(each, f"c{number}") for number, each in enumerate(servers, 1))) as opened:
        cluster = Cluster(opened)
        leases = Leases(cluster, "repair")
        leases.take("w0")
        assert (opened.machine, servers[1].requests) == ("c1", [])
        servers[0].stop()
        leases.confirm("w0", wait=False)
        assert opened.machine == "c2"
        assert set(opened.failures) == {"c1"}
        cluster.cordon("w0", "r1", "a test", time.time())
        assert api.nodes["w0"]["spec"]["unschedulable"]
        leases.release("w0")
        leases.close()
    assert api.leases == {}


@pytest.mark.parametrize(
    ("argv", "why"), [(HANGS, "no response in 1 s"), (REFUSES, "the SSH connection is refused"), (GARBAGE, "invalid")]
)
def test_a_control_plane_that_hangs_refuses_or_sends_garbage_is_passed_over(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, argv: list[str], why: str
) -> None:
    if argv is HANGS:
        monkeypatch.setattr(sessions, "TURN_S", 1.0)
    with session(Transport(argv, machine="c1"), *others(servers[1:2])) as opened:
        assert {node.name for node in Cluster(opened).nodes()} == {"c1", "c2", "c3", "w0"}
        assert opened.machine == "c2"
        assert why in opened.failures["c1"]
        began = time.monotonic()
        Cluster(opened).nodes()
        assert time.monotonic() - began < 5.0, "it is not tried again for each request"


def test_an_api_server_without_its_etcd_is_passed_over(servers: list[Server]) -> None:
    servers[0].status = 503
    with session(local(servers[0], "c1"), local(servers[1], "c2")) as opened:
        Cluster(opened).nodes()
        assert opened.machine == "c2"


def test_a_body_that_is_not_one_of_kubernetes_is_passed_over(servers: list[Server]) -> None:
    ca = kubeconfig.ca_hash(kubeconfig.load(str(servers[0].kubeconfig)).ca)  # type: ignore[union-attr]  # it exists
    frame = {"status": 200, "body": {"items": [{"metadata": 5}]}, "error": "", "time": 1.0, "ca": ca}
    program = (
        f"import json, sys; print('\\n{MARK}')\nfor line in sys.stdin:\n"
        f"    print(json.dumps({{'id': json.loads(line)['id'], **{frame!r}}}), flush=True)\n"
    )
    with session(Transport([sys.executable, "-c", program], machine="c1"), *others(servers[1:])) as opened:
        assert len(Cluster(opened).nodes()) == 4
        assert opened.machine == "c2"


def test_what_may_have_had_an_effect_is_sent_once(servers: list[Server], api: Api) -> None:
    """An Event or an eviction is not repeated on another control plane; the next request goes there."""
    servers[0].mute = True
    with session(local(servers[0], "c1"), local(servers[1], "c2")) as opened:
        cluster = Cluster(opened)
        assert cluster.evict(POD)
        assert opened.machine == "c2"
        servers[1].mute = True
        cluster.event("w0", "Test", "text", warning=False)
        posts = [each for server in servers for each in server.requests if each[0] == "POST"]
        assert [path.rpartition("/")[2] for _, path in posts] == ["eviction", "events"]
    assert len(api.events) == 1
    assert is_sent_once("POST", "/api/v1/namespaces/default/events")
    assert is_sent_once("POST", "/api/v1/namespaces/default/pods/p1/eviction")
    assert not is_sent_once("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases")
    assert not is_sent_once("GET", "/api/v1/namespaces/default/events")


def test_a_change_that_took_effect_without_a_response_is_repeated_without_harm(servers: list[Server], api: Api) -> None:
    """The second attempt conflicts with the first one, and its sender reads what is there."""
    with session(*(local(each, f"c{number}") for number, each in enumerate(servers, 1))) as opened:
        cluster, leases = Cluster(opened), Leases(Cluster(opened), "repair")
        servers[0].mute = True
        assert leases.take("w0") == ""
        assert len(api.leases) == 1
        servers[0].mute, servers[1].mute = False, True
        assert cluster.cordon("w0", "r1", "a test", time.time()), "the cordon is its own"
        servers[1].mute, servers[2].mute = False, True
        leases.confirm("w0", wait=False)
        leases.release("w0")
        leases.close()
    assert api.leases == {}


def test_no_cluster_is_reported_only_if_no_control_plane_that_responds_has_one(
    servers: list[Server], tmp_path: Path
) -> None:
    none = here(sys.executable, tmp_path / "none", "c1")
    with session(none, local(servers[1], "c2")) as opened:
        assert len(Cluster(opened).nodes()) == 4
    servers[1].stop()
    with session(none, local(servers[1], "c2")) as opened, pytest.raises(NoResponse) as down:
        Cluster(opened).call_once("GET", "/version")
    assert type(down.value) is NoResponse, "it has a cluster, whose API is down"
    with session(none, Transport(REFUSES, machine="c2")) as opened, pytest.raises(NoCluster):
        Cluster(opened).call_once("GET", "/version")
    with (
        session(Transport(REFUSES, machine="c1"), Transport(REFUSES, machine="c2")) as opened,
        pytest.raises(NoSession, match=r"c1: the SSH connection is refused.*; c2: the SSH connection is refused"),
    ):
        Cluster(opened).call_once("GET", "/version")


# Another cluster


def ca_of(server: Server) -> str:
    config = kubeconfig.load(str(server.kubeconfig))
    assert config
    return config.ca_hash


def test_a_machine_of_another_cluster_is_never_used(
    servers: list[Server], tmp_path: Path, certificates: tuple[Path, Path]
) -> None:
    another = Server(tmp_path, Api(), certificates[1], "another")
    remembered: list[str] = []
    with session(local(servers[0], "c1"), local(another, "c2"), remember=remembered.append) as opened:
        Cluster(opened).nodes()
        servers[0].stop()
        with pytest.raises(NoResponse, match="c2: it belongs to another cluster"):
            Cluster(opened, patience_s=0).nodes()
    assert remembered == [ca_of(servers[0])]
    # The next command knows the CA.
    with (
        session(local(servers[0], "c1"), local(another, "c2"), ca=remembered[0]) as opened,
        pytest.raises(OtherCluster, match="not of one cluster"),
    ):
        Cluster(opened, patience_s=0).nodes()
    assert another.requests == [], "not even a read"
    another.stop()


def test_a_cluster_that_was_created_anew_is_believed_by_a_majority(servers: list[Server]) -> None:
    remembered: list[str] = []
    transports = [local(each, f"c{number}") for number, each in enumerate(servers, 1)]
    with session(*transports, ca="sha256:old", remember=remembered.append) as opened:
        assert len(Cluster(opened).nodes()) == 4
    assert remembered == [ca_of(servers[0])]
    dead = [Transport(REFUSES, machine=name) for name in ("c2", "c3")]
    with session(transports[0], *dead, ca="sha256:old") as opened, pytest.raises(OtherCluster):
        Cluster(opened).call_once("GET", "/version")
    with session(transports[0], ca="sha256:old") as opened:
        assert len(Cluster(opened).nodes()) == 4, "a single one is the cluster"


# Its own API server, and the endpoint


def test_the_api_server_of_the_machine_itself_is_used_when_the_endpoint_is_dead(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dead,) = sshd.free_ports(1)
    admin, own = tmp_path / "admin.conf", tmp_path / "controller-manager.conf"
    admin.write_text(servers[0].kubeconfig.read_text().replace(servers[0].url, f"https://127.0.0.1:{dead}"))
    own.write_text(servers[0].kubeconfig.read_text())
    monkeypatch.setattr(kubeconfig, "ADMIN", str(admin))
    monkeypatch.setattr(kubeconfig, "CONTROLLER_MANAGER", str(own))
    config = kubeconfig.load(str(admin))
    assert config
    assert config.server.endswith(f":{dead}"), "the endpoint of the cluster stays what is reported"
    assert kube_api.Client(config, patience_s=0).get("/version") == {}
    # The other way round: its own API server is down, and the endpoint leads to another one.
    admin.write_text(servers[1].kubeconfig.read_text())
    servers[0].stop()
    config = kubeconfig.load(str(admin))
    assert config
    assert kube_api.Client(config, patience_s=0).get("/version") == {}
    # A file of another cluster's CA is ignored.
    own.write_text("    certificate-authority-data: aGVsbG8=\n    server: https://127.0.0.1:1\n")
    assert kubeconfig.load(str(admin)).own == ""  # type: ignore[union-attr]  # it exists


# Over SSH


@pytest.mark.long
@pytest.mark.skipif(sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd, and root to run it")
def test_a_command_goes_on_over_another_sshd(servers: list[Server], tmp_path: Path) -> None:
    ports = sshd.free_ports(2)
    with contextlib.ExitStack() as stack:
        transports = []
        first = contextlib.ExitStack()
        for number, port in enumerate(ports):
            folder = tmp_path / f"sshd-{number}"
            folder.mkdir()
            started = stack.enter_context(contextlib.ExitStack())
            running = started.enter_context(sshd.serving(folder, [{("127.0.0.1", port): ""}]))
            variables = {
                "ansible_port": port,
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(running.login),
                "ansible_python_interpreter": sys.executable,
            }
            transports.append(over_ssh("127.0.0.1", variables, str(servers[number].kubeconfig), f"c{number}"))
            if number == 0:
                first = started
        with session(*transports) as opened:
            cluster = Cluster(opened)
            leases = Leases(cluster, "repair")
            leases.take("w0")
            assert opened.machine == "c0"
            first.close()
            used = opened._connections[0]
            assert isinstance(used, Connection)
            process = used._process
            assert process
            process.kill()
            leases.confirm("w0", wait=False)
            assert opened.machine == "c1"
            leases.release("w0")
            leases.close()


# The lock of commands that find no API


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[group_lock.Member]:
    """Three control planes, each with its lock file; the program that holds the lock runs here, without SSH."""
    remote, connect = commands.remote, locks._connect

    def without_root(argv: Sequence[str], _variables: object, _: Become, stdin: bytes, *, marks: bool) -> RemoteCommand:
        return remote([sys.executable, *argv[1:]], {}, Become.NEVER, stdin, marks=marks)

    def connect_to(address: str, variables: Any, who: Any, machine: str) -> Any:
        if variables.get("dead"):
            raise NoLock(f"{address}: no route to host")
        monkeypatch.setattr(command_lock, "PATH", str(tmp_path / address))
        return connect(address, variables, who, machine)

    monkeypatch.setattr(shell, "command", lambda *_: ["sh", "-c"])
    monkeypatch.setattr(commands, "remote", without_root)
    monkeypatch.setattr(locks, "_connect", connect_to)
    return [group_lock.Member(name, name, {}) for name in ("c1", "c2", "c3")]


def dead(member: group_lock.Member) -> group_lock.Member:
    return group_lock.Member(member.name, member.address, {"dead": True})


def holders(tmp_path: Path) -> list[Any]:
    return [(command_lock.holder(str(tmp_path / name)) or {}).get("command") for name in ("c1", "c2", "c3")]


def test_two_commands_that_reach_different_machines_do_not_both_get_the_lock(
    machines: list[group_lock.Member], tmp_path: Path
) -> None:
    one, two, three = machines
    with group_lock.hold([one, two, dead(three)], "up") as lock:
        assert holders(tmp_path) == ["up", "up", None]
        with (
            pytest.raises(Taken, match="another command works on this cluster: up of"),
            group_lock.hold([dead(one), two, three], "reset"),
        ):
            pass
        with pytest.raises(Taken), group_lock.hold(machines, "reset"):
            pass
        assert holders(tmp_path) == ["up", "up", None], "what was taken before the conflict is released"
        assert lock.lost() is None
    assert holders(tmp_path) == [None, None, None]
    with group_lock.hold([dead(one), two, three], "reset"):
        assert holders(tmp_path) == [None, "reset", "reset"]


def test_without_a_majority_there_is_no_lock_and_the_error_names_who_does_not_respond(
    machines: list[group_lock.Member], tmp_path: Path
) -> None:
    one, two, three = machines
    with (
        pytest.raises(NoLock, match=r"2 of 3 control planes .*: c2: .*no route.*; c3: ") as refused,
        group_lock.hold([one, dead(two), dead(three)], "up"),
    ):
        pass
    assert "remove a machine that is gone from the group control_plane" in refused.value.problem.remedy
    assert holders(tmp_path) == [None, None, None]
    with pytest.raises(NoLock, match=r"^c1: no route to host$"), group_lock.hold([dead(one)], "up"):
        pass


def test_the_lock_is_held_while_a_majority_is(machines: list[group_lock.Member]) -> None:
    with group_lock.hold(machines, "up") as lock:
        members = list(lock._held.values())
        members[0]._process.kill()
        _until(lambda: members[0].lost() is not None)
        assert lock.lost() is None
        members[1]._process.kill()
        _until(lambda: lock.lost() is not None)
        assert "is lost" in str(lock.lost())


def test_a_lock_over_ssh_on_a_majority_is_found_over_any_control_plane() -> None:
    """The session reads the lock of so many machines that one of every majority is among them."""

    up = {"command": "up"}

    def program(holder: Any) -> Transport:
        frame = {"status": 200, "body": holder, "error": "", "time": 1.0, "ca": ""}
        text = (
            f"import json, sys; print('\\n{MARK}')\nfor line in sys.stdin:\n"
            f"    print(json.dumps({{'id': json.loads(line)['id'], **{frame!r}}}), flush=True)\n"
        )
        return Transport([sys.executable, "-c", text])

    def transports(*each: Any) -> list[Transport]:
        made = [Transport(REFUSES) if one == "dead" else program(up if one else None) for one in each]
        return [Transport(one.argv, machine=f"c{number}") for number, one in enumerate(made, 1)]

    cases = {(None, "up", "up"): up, ("up", None, "up"): up, ("dead", None, None): None, (None, "dead", "up"): up}
    for each, found in cases.items():
        with session(*transports(*each)) as opened:
            assert Cluster(opened).lock_holder() == found
    with session(*transports(None, "dead", "dead")) as opened, pytest.raises(NoSession, match="may hold a lock there"):
        Cluster(opened).lock_holder()
    assert (NO_CLUSTER, NO_SESSION, OTHER_CLUSTER) == (-1, -2, -4), "numbers of the program (module_utils/session.py)"


def _until(met: Any) -> None:
    deadline = time.monotonic() + 20
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)
