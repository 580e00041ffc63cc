"""BMCs behind an SSH jump host: a real sshd that forwards to one BMC only, and stand-in Redfish services behind it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.autoscale import plan
from gpunodes.autoscale.power import BmcMachines
from gpunodes.engine import power
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Order, PowerProblem, PowerState, Trouble, kinds
from gpunodes.engine.remote import relay
from gpunodes.errors import WrongInput
from gpunodes.identity.model import MachineIdentity
from gpunodes.operations.autoscale.jumps import Jumps

from tests import redfish, sshd
from tests.power_fleet import document, uuid

pytestmark = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


@dataclass
class Site:
    """A jump host, and the BMC behind it; ``closed`` is a BMC to which the jump host forwards nothing."""

    port: int
    servers: sshd.Servers
    bmc: ThreadingHTTPServer
    closed: ThreadingHTTPServer
    orders: list[str]

    def given(self, **more: Any) -> dict[str, Any]:
        """The settings of the machine."""
        return settings.resolve({
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": f"http://127.0.0.1:{self.bmc.server_port}",
            "gpunodes_bmc_user": "admin",
            "gpunodes_bmc_password": "secret",
            "gpunodes_bmc_jump": f"root@127.0.0.1:{self.port}",
            "gpunodes_bmc_jump_key": str(self.servers.login),
            **more,
        })  # fmt: skip

    def logins(self) -> int:
        """How often somebody logged in at the jump host."""
        return (self.servers.folder / "sshd-0.log").read_text().count("Accepted publickey")

    def learn(self) -> None:
        """The controller knows the key of the jump host."""
        _, key, *_ = self.servers.host_key.with_suffix(".pub").read_text().split()
        path = settings.known_hosts()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[127.0.0.1]:{self.port} ssh-ed25519 {key}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("gpunodes.autoscale.power._POLL_S", 0.02)
    orders: list[str] = []
    bmc = redfish.fake("obeys", resets=orders, hardware={"UUID": uuid("w1")})
    closed = redfish.fake("obeys")
    [port] = sshd.free_ports(1)
    more = f"PermitOpen 127.0.0.1:{bmc.server_port}\nLogLevel INFO\n"
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(sshd, "_CONFIG", sshd._CONFIG.replace("LogLevel ERROR\n", ""))
        monkeypatch.setattr(relay, "_RELAYS", relay._Relays())
        servers = stack.enter_context(sshd.serving(tmp_path, [{("127.0.0.1", port): ""}], lambda _: more))
        yield Site(port, servers, bmc, closed, orders)
    for each in (bmc, closed):
        each.shutdown()
        each.server_close()


def connect(given: dict[str, Any]) -> power.Power:
    access = kinds.access("gpu-1", given)
    assert access is not None
    return kinds.connect("gpu-1", access)


def test_a_bmc_is_ordered_through_the_jump_host(site: Site) -> None:
    bmc = connect(site.given())
    assert bmc.name.endswith(" through jump host 127.0.0.1")
    power.change(bmc, Order.ON, redfish.held, 15, 0.1)
    assert bmc.state() is PowerState.ON
    assert site.orders == ["On"]
    assert site.logins() == 1, "all requests share one connection"
    assert site.servers.host_key.with_suffix(".pub").read_text().split()[1] in settings.known_hosts().read_text()
    known = MachineIdentity("gpu-1", system_uuid=uuid("w1"))
    assert MachineControl("gpu-1", "", site.given(), 0.0, known).own_power().state() is PowerState.ON


def test_nothing_passes_around_the_jump_host(site: Site) -> None:
    address = f"http://127.0.0.1:{site.closed.server_port}"
    with pytest.raises(PowerProblem, match="is not reached: from the jump host: Administratively prohibited") as caught:
        connect(site.given(gpunodes_bmc_address=address)).state()
    assert caught.value.trouble is Trouble.UNREACHABLE
    assert "correct gpunodes_bmc_jump" in str(caught.value.problem.remedy)
    # Its connection still serves others.
    assert connect(site.given()).state() is PowerState.OFF
    assert site.logins() == 1


def test_tls_is_verified_through_the_jump_host(site: Site, tmp_path: Path) -> None:
    ca, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
         "-out", ca, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    site.bmc.socket = context.wrap_socket(site.bmc.socket, server_side=True)
    given = site.given(gpunodes_bmc_address=f"127.0.0.1:{site.bmc.server_port}")
    assert connect({**given, "gpunodes_bmc_verify": str(ca)}).state() is PowerState.OFF
    with pytest.raises(PowerProblem) as caught:
        connect(given).state()
    assert caught.value.trouble is Trouble.TLS


def test_a_jump_host_with_another_key_gets_no_login(site: Site) -> None:
    other = sshd.new_key(site.servers.folder / "other").with_suffix(".pub").read_text().split()[1]
    settings.known_hosts().parent.mkdir(parents=True, exist_ok=True)
    settings.known_hosts().write_text(f"[127.0.0.1]:{site.port} ssh-ed25519 {other}\n")
    with pytest.raises(PowerProblem, match="its host key has changed"):
        connect(site.given()).state()
    assert site.logins() == 0


def test_a_connection_that_broke_is_made_again(site: Site) -> None:
    bmc = connect(site.given())
    assert bmc.state() is PowerState.OFF
    [jump] = relay._RELAYS._open.values()
    until(lambda: jump.users == 0)
    jump.hosts.close()
    assert bmc.state() is PowerState.OFF
    assert site.logins() == 2


def test_an_idle_connection_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_IDLE_S", 0.2)
    assert connect(site.given()).state() is PowerState.OFF
    until(lambda: not relay._RELAYS._open)


def test_a_jump_host_that_does_not_respond_ends_in_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that sends nothing: the limit of the call applies, not those of SSH."""
    monkeypatch.setattr("gpunodes.engine.power.redfish._CALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        jump = f"root@127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PowerProblem, match="no response in time"):
            connect(site.given(gpunodes_bmc_jump=jump)).state()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["ipmi", "wol", "command"])
def test_other_kinds_are_refused_in_one_sentence(site: Site, kind: str) -> None:
    given = site.given(gpunodes_bmc_type=kind, gpunodes_bmc_command="x", gpunodes_bmc_mac="52:54:00:12:34:56")
    with pytest.raises(WrongInput, match=f"its gpunodes_bmc_type is {kind}: ") as caught:
        kinds.access("gpu-1", given)
    assert ("UDP" in caught.value.problem.found) is (kind != "command")
    assert "\n" not in str(caught.value)


def test_the_forms_of_the_setting() -> None:
    for good in ("", "bastion", "ops@10.0.0.1", "ops@[2001:db8::1]:2222", "a@b,c@d:22"):
        assert not list(settings.problems({"gpunodes_bmc_jump": good})), good
    for wrong in ("-oProxyCommand=x", "a b", "a;b", "ops@-x", "ssh://x"):
        assert list(settings.problems({"gpunodes_bmc_jump": wrong})), wrong


# The power server

Start = Callable[[], BmcMachines]


def machines(site: Site, tmp_path: Path, jumps: Jumps | None = None) -> BmcMachines:
    """The machines of a plan that was gathered on the controller; without its files the server has only its Secret."""
    jumps = jumps or Jumps()
    given = site.given()
    name = jumps.add("w1", kinds.access("w1", given))
    found = document({"w1": "h100"}, {"h100": (0, 1, 0)})
    found["jumps"] = jumps.documents
    keys = [key for key in given if key.startswith("gpunodes_bmc_") and "password" not in key]
    bmc = {key: str(given[key]) for key in keys if key != "gpunodes_bmc_jump_key"}
    found["machines"]["w1"]["bmc"] = {**bmc, "gpunodes_bmc_verify": "true", "gpunodes_bmc_jump": name}
    secret = tmp_path / "secret"
    secret.mkdir(exist_ok=True)
    for key, text in {"w1": "secret", **jumps.keys}.items():
        (secret / key).write_text(text)
    leases: Any = type("Locks", (), dict.fromkeys(("take", "confirm", "release_unused"), lambda *_: None))()
    return BmcMachines(plan.parse(found), secret, leases, lambda _: None, shutdown_s=0.3)


def test_the_power_server_uses_the_key_of_its_secret(site: Site, tmp_path: Path) -> None:
    site.learn()
    server = machines(site, tmp_path)
    settings.known_hosts().unlink()
    site.servers.login.unlink()
    server.switch_on("w1", lambda: None, again=False)
    assert server.state("w1") is PowerState.ON
    server.switch_off("w1", lambda: None, lambda: None)
    assert site.orders == ["On", "GracefulShutdown"]
    assert site.logins() == 1
    assert not settings.known_hosts().exists(), "it learns no keys"


def test_the_power_server_accepts_only_the_host_key_of_its_plan(site: Site, tmp_path: Path) -> None:
    other = sshd.new_key(tmp_path / "other").with_suffix(".pub").read_text().split()[1]
    site.learn()
    settings.known_hosts().write_text(f"[127.0.0.1]:{site.port} ssh-ed25519 {other}\n")
    server = machines(site, tmp_path)
    site.learn()
    with pytest.raises(PowerProblem, match="its host key has changed"):
        server.state("w1")
    assert site.logins() == 0


def test_a_plan_needs_the_host_key(site: Site) -> None:
    with pytest.raises(WrongInput, match=r"host key of jump host 127\.0\.0\.1 before the BMC of w1 is not known"):
        Jumps().add("w1", kinds.access("w1", site.given()))


def test_a_plan_has_each_jump_host_once_and_no_key(site: Site) -> None:
    site.learn()
    jumps = Jumps()
    assert {jumps.add(name, kinds.access(name, site.given())) for name in ("w1", "w2")} == {"1"}
    assert jumps.keys == {"JUMP-KEY-1": site.servers.login.read_text()}
    assert "PRIVATE" not in f"{jumps.documents}{jumps!r}"


def test_a_key_that_the_server_cannot_use_is_refused(site: Site, tmp_path: Path) -> None:
    site.learn()
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "long secret", "-f", locked], check=True)
    for file, mode, wanted in ((locked, 0o600, "passphrase"), (site.servers.login, 0o644, "mode 0644")):
        file.chmod(mode)
        with pytest.raises(WrongInput, match=wanted):
            Jumps().add("w1", kinds.access("w1", site.given(gpunodes_bmc_jump_key=str(file))))


def until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)
