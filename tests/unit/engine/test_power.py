"""Power: sushy-tools' Redfish emulator with its fake driver, BMCs that misbehave, ipmitool and commands of a user."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.engine import power
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble, kinds
from gpunodes.engine.power import command as power_command
from gpunodes.engine.power import ipmi as power_ipmi
from gpunodes.engine.power import program as power_program
from gpunodes.engine.power import redfish as power_redfish
from gpunodes.errors import GpunodesError, WrongInput

from tests import redfish

PASSWORD = "correct horse"
UUID = "9c1e4b1a-5c3b-4d0e-9a2f-0123456789ab"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def access(kind: str = "redfish", address: str = "", **more: Any) -> Access:
    return Access(**{"kind": kind, "address": address, "user": "admin", "password": PASSWORD, **more})


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """sushy-tools' unmodified emulator with its fake driver; its address."""
    import bcrypt

    folder, port = tmp_path_factory.mktemp("bmc"), free_port()
    users = folder / "htpasswd"
    users.write_text(f"admin:{bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(rounds=4)).decode()}\n")
    config = folder / "config.py"
    config.write_text(
        f"SUSHY_EMULATOR_LISTEN_IP = '127.0.0.1'\nSUSHY_EMULATOR_LISTEN_PORT = {port}\n"
        f"SUSHY_EMULATOR_AUTH_FILE = {str(users)!r}\nSUSHY_EMULATOR_STATE_DIR = {str(folder)!r}\n"
        "SUSHY_EMULATOR_FAKE_DRIVER = True\n"
        f"SUSHY_EMULATOR_FAKE_SYSTEMS = [{{'uuid': {UUID!r}, 'name': 'gpu-1', 'power_state': 'Off', 'nics': []}}]\n"
    )
    words = [str(Path(sys.executable).with_name("sushy-emulator")), "--config", str(config), "--fake"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the emulator does not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_redfish_switches_a_machine_on_and_off(emulator: str) -> None:
    bmc = kinds.connect("gpu-1", access(address=emulator))
    power.change(bmc, Order.ON, redfish.held, 15, 0.1)
    assert bmc.state() is PowerState.ON
    bmc.order(Order.RESET)
    power.change(bmc, Order.OFF, redfish.held, 15, 0.1)
    assert bmc.state() is PowerState.OFF
    power.change(bmc, Order.OFF, redfish.held, 15, 0.1)


def test_a_wrong_password_is_reported_but_not_shown(emulator: str) -> None:
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access(address=emulator, password="wrong secret")).state()
    assert message.value.trouble is Trouble.LOGIN
    assert "wrong secret" not in str(message.value)


def test_an_unknown_system_is_reported_with_the_known_ones(emulator: str) -> None:
    with pytest.raises(PowerProblem, match=UUID):
        kinds.connect("gpu-1", access(address=emulator, system="none")).state()
    assert kinds.connect("gpu-1", access(address=emulator, system=UUID)).state() in set(PowerState)


def test_a_bmc_that_is_down() -> None:
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access(address=f"http://127.0.0.1:{free_port()}")).state()
    assert message.value.trouble is Trouble.UNREACHABLE


@pytest.mark.parametrize(("manner", "trouble"), [("lies", Trouble.INCONSISTENT), ("refuses", Trouble.REFUSED)])
def test_an_inconsistent_bmc_and_a_refusing_one_are_distinguished(manner: str, trouble: Trouble) -> None:
    server = redfish.fake(manner)
    bmc = kinds.connect("gpu-1", access(address=f"http://127.0.0.1:{server.server_port}", user="", password=""))
    with pytest.raises(PowerProblem) as message:
        power.change(bmc, Order.ON, redfish.held, 0.5, 0.1)
    assert message.value.trouble is trouble
    server.shutdown()


def at(server: ThreadingHTTPServer) -> power.Power:
    return kinds.connect("gpu-1", access(address=f"http://127.0.0.1:{server.server_port}", user="", password=""))


def test_a_power_action_whose_response_is_lost_is_not_repeated() -> None:
    """When the BMC closes the connection, the reset may have been carried out: a retry would reset twice."""
    orders: list[str] = []
    server = redfish.fake("hangs-up", orders=orders)
    with pytest.raises(PowerProblem):
        at(server).order(Order.RESET)
    assert orders == [redfish.RESET]
    server.shutdown()


@pytest.mark.parametrize("manner", ["drips", "drips-headers", "handshake", "resolver"])
def test_a_call_ends_whatever_the_bmc_does(manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow BMC or name service does not exceed the deadline: in its response, in TLS, or in the lookup."""
    monkeypatch.setattr(power_redfish, "_CALL_S", 1.0)
    threads = threading.active_count()
    address = "https://bmc.invalid"
    resolve, done = socket.getaddrinfo, threading.Event()

    def hanging(*args: Any, **more: Any) -> Any:
        if args[0] == "bmc.invalid" and not more.get("flags"):
            done.wait(20)
        return resolve(*args, **more)

    if manner == "handshake":
        listening = redfish.dripping_handshake()
        address = f"https://127.0.0.1:{listening.getsockname()[1]}"
    elif manner != "resolver":
        server = redfish.fake(manner)
        address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(PowerProblem, match="in time") as message:
            kinds.connect("gpu-1", access(address=address, verify=False)).state()
        assert message.value.trouble is Trouble.UNREACHABLE
    assert time.monotonic() - began < 8
    done.set()
    if manner == "handshake":
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
    elif manner != "resolver":
        server.shutdown()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.1)


def problem_of(ask: Callable[[], object]) -> PowerProblem | None:
    """The PowerProblem, None without one; any other exception fails the test."""
    try:
        ask()
    except PowerProblem as problem:
        return problem
    return None


DEEP = 100_000
BODIES = {
    "list": b"[]",
    "text": b'"On"',
    "null": b"null",
    "number": b"5",
    "deep list": b"[" * DEEP + b"]" * DEEP,
    "deep object": b'{"a":' * 400 + b"1" + b"}" * 400,
    "no JSON": b"<html>\x1b[2J</html>",
    "no UTF-8": b'{"PowerState": "\xff\xfe"}',
    "nothing": b"",
    "huge": b'{"PowerState": "' + b"x" * 2**21 + b'"}',
    "long number": b'{"PowerState": ' + b"9" * 10_000 + b"}",
    "wrong types": b'{"PowerState": {"a": []}, "Systems": [1], "Members": {"a": 1}, "Actions": "x", "Id": []}',
    "null everywhere": b'{"PowerState": null, "Systems": null, "Members": [null], "Actions": null, "Id": null}',
    "members of numbers": b'{"Members": [{"@odata.id": 5}], "Systems": {"@odata.id": {}}, "PowerState": 1}',
    "elsewhere": b'{"Members": [{"@odata.id": "http://127.0.0.1:1/x"}], "Systems": {"@odata.id": "http://127.0.0.1:1/"}}',
    "control signs": b'{"Members": [{"@odata.id": "/a/\\u001b[2J"}, {"@odata.id": "/b"}], "PowerState": "\\u001b["}',
}
HEADERS = {
    "redirect": (302, {"Location": "http://127.0.0.1:1/elsewhere"}, b""),
    "redirect in a circle": (307, {"Location": redfish.ROOT}, b""),
    "bomb": (200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * 2**24)),
    "no gzip": (200, {"Content-Encoding": "gzip"}, b"{}"),
    "odd length": (200, {"Content-Length": "-5"}, b"{}"),
    "no status": (99, {}, b"{}"),
    "error in a list": (500, {}, b'[{"error": 1}]'),
    "error of wrong types": (400, {}, b'{"error": [1]}'),
    "login in a list": (401, {}, b"[]"),
}
ODD = {**{name: (200, {}, body) for name, body in BODIES.items()}, **HEADERS}


@pytest.mark.parametrize("path", [redfish.ROOT, redfish.SYSTEMS, redfish.SYSTEM, redfish.RESET])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_any_response_of_a_bmc_is_a_state_or_one_sentence(
    odd: tuple[int, Mapping[str, str], bytes], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists, strings, null, deep and huge JSON, redirects: one line without control characters, and no other error."""
    monkeypatch.setattr(power_redfish, "_CALL_S", 5.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server = redfish.fake("lies", odd={path: odd})
    bmc = at(server)
    for ask in (bmc.state, lambda: bmc.order(Order.RESET)):
        message = problem_of(ask)
        assert message is None or str(message).isprintable()
        assert len(str(message)) < 600
        assert message is None or message.trouble is Trouble.REFUSED or "401" in str(odd[0]), message
    server.shutdown()


def test_a_missing_ca_file_is_reported() -> None:
    """A path that does not exist is reported before the first request."""
    with pytest.raises(PowerProblem, match=r"/nowhere/ca\.pem"):
        kinds.connect("gpu-1", access(address="127.0.0.1:1", verify="/nowhere/ca.pem")).state()


def bmc(**message: Any) -> Access:
    """The access to a BMC with these settings."""
    found = kinds.access(
        "gpu-1", settings.resolve({"gpunodes_bmc_type": "redfish", "gpunodes_bmc_address": "b", **message})
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("value", "verified"),
    [("", True), (None, True), (True, True), ("true", True), (False, False), ("false", False), ("False", False)],
)
def test_only_false_disables_the_verification_of_a_certificate(value: Any, verified: bool) -> None:
    """An empty setting disabled it; INI inventories have strings in place of booleans."""
    assert bmc(gpunodes_bmc_verify=value).verify is verified


@pytest.mark.parametrize("value", ["0", 0, "no", "off", [], {}, "/no/such/ca.pem", 1])
def test_an_invalid_value_for_the_verification_is_refused(value: Any) -> None:
    with pytest.raises(WrongInput, match="gpunodes_bmc_verify of gpu-1"):
        bmc(gpunodes_bmc_verify=value)


def test_the_certificate_authority_of_a_bmc(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    assert bmc(gpunodes_bmc_verify=str(tmp_path / "ca.pem")).verify == str(tmp_path / "ca.pem")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "bmc.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=bmc", "-addext", "subjectAltName=IP:127.0.0.1,IP:::1"]
    subprocess.run([*words, "-keyout", str(path), "-out", str(tmp_path / "cert")], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "cert").read_text())
    return path


def test_tls_is_verified_unless_the_inventory_disables_it(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = redfish.fake("lies", context)
    address = f"127.0.0.1:{server.server_port}"
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access(address=address, user="", password="")).state()
    assert message.value.trouble is Trouble.TLS
    for verify in (False, str(certificate)):
        assert kinds.connect("gpu-1", access(address=address, user="", password="", verify=verify)).state() is (
            PowerState.OFF
        )
    server.shutdown()


def test_a_bmc_at_an_ipv6_address(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    orders: list[str] = []
    server = redfish.fake("obeys", context, orders=orders, address="::1")
    for address in (f"[::1]:{server.server_port}", f"https://[::1]:{server.server_port}"):
        bmc = kinds.connect("gpu-1", access(address=address, user="", password="", verify=str(certificate)))
        power.change(bmc, Order.ON, redfish.held, 5, 0.1)
        power.change(bmc, Order.OFF, redfish.held, 5, 0.1)
    assert orders == [redfish.RESET] * 4
    server.shutdown()


@pytest.mark.parametrize("address", ["https://2001:db8::7", "http://2001:db8::7:8000/redfish", "https://::1/"])
def test_an_ipv6_address_without_brackets_in_a_url(address: str) -> None:
    """Where its port begins is unclear, so it is refused before any request."""
    with pytest.raises(WrongInput, match=r"gpunodes_bmc_address of gpu-1 is a URL with the host '[0-9a-f:]+'"):
        bmc(gpunodes_bmc_address=address)


@pytest.mark.parametrize(
    "address", ["https://admin:secret@10.1.0.3", "http://admin:se/cret@2001:db8::7:80/redfish", "admin:secret@10.1.0.3"]
)
def test_a_password_in_the_address_is_refused_and_not_shown(address: str) -> None:
    """The BMC's name has the address, and so has each error of it."""
    with pytest.raises(WrongInput, match="gpunodes_bmc_address of gpu-1 contains a user name or a password") as raised:
        bmc(gpunodes_bmc_address=address)
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("address", ["2001:db8::7", "https://[2001:db8::7]", "https://[::1]:8443/", "https://bmc:80"])
def test_other_addresses_are_accepted(address: str) -> None:
    assert bmc(gpunodes_bmc_address=address).address == address


IPMITOOL = """#!/bin/sh
echo "$@" >>"$LOG"
[ "$IPMI_PASSWORD" = "correct horse" ] || { echo "Error: RAKP 2 HMAC is invalid" >&2; exit 1; }
case "$*" in
*status) echo "Chassis Power is $(cat "$STATE")" ;;
*" on"|*" off") echo "${*##* }" >"$STATE" ;;
*" 10.0.0.9 "*) echo "Error: Unable to establish IPMI v2 / RMCP+ session" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def ipmitool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ipmitool with the same arguments: not every machine has it."""
    program = tmp_path / "bin" / "ipmitool"
    program.parent.mkdir()
    program.write_text(IPMITOOL)
    program.chmod(0o755)
    (tmp_path / "state").write_text("off\n")
    for name, value in {"LOG": "log", "STATE": "state"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("address", "words", "url"),
    [
        ("bmc-1", "-H bmc-1 ", "https://bmc-1"),
        ("10.0.0.7:6230", "-H 10.0.0.7 -p 6230 ", "https://10.0.0.7:6230"),
        ("fd00::7", "-H fd00::7 ", "https://[fd00::7]"),
        ("[fd00::7]", "-H fd00::7 ", "https://[fd00::7]"),
        ("[fd00::7]:6230", "-H fd00::7 -p 6230 ", "https://[fd00::7]:6230"),
    ],
)
def test_the_address_of_a_bmc_may_be_an_ipv6_one(ipmitool: Path, address: str, words: str, url: str) -> None:
    with contextlib.suppress(PowerProblem):
        kinds.connect("gpu-1", access("ipmi", address)).state()
    assert words in (ipmitool / "log").read_text()
    assert kinds.connect("gpu-1", access("redfish", address)).name == f"Redfish at {url}"


def test_ipmi_keeps_the_password_out_of_its_arguments(ipmitool: Path) -> None:
    bmc = kinds.connect("gpu-1", access("ipmi", "10.0.0.8:6230"))
    power.change(bmc, Order.ON, redfish.held, 5, 0.1)
    assert bmc.state() is PowerState.ON
    log = (ipmitool / "log").read_text()
    assert "-H 10.0.0.8 -p 6230" in log
    assert PASSWORD not in log
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access("ipmi", "10.0.0.8", password="x")).state()
    assert message.value.trouble is Trouble.LOGIN
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access("ipmi", "10.0.0.9")).order(Order.RESET)
    assert message.value.trouble is Trouble.UNREACHABLE


def test_a_command_of_the_user(tmp_path: Path) -> None:
    program = tmp_path / "pdu"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = gpu-1 ] || {{ echo "who is $2?" >&2; exit 1; }}\n'
        f"case $1 in status) cat {tmp_path}/state;; *) echo $1 >{tmp_path}/state;; esac\n"
    )
    program.chmod(0o755)
    (tmp_path / "state").write_text("off\n")
    own = access("command", command=str(program))
    bmc = kinds.connect("gpu-1", own)
    power.change(bmc, Order.ON, redfish.held, 5, 0.1)
    assert bmc.state() is PowerState.ON
    with pytest.raises(PowerProblem, match=r"who is gpu-2\?") as message:
        kinds.connect("gpu-2", own).order(Order.OFF)
    assert message.value.trouble is Trouble.REFUSED
    with pytest.raises(PowerProblem) as message:
        kinds.connect("gpu-1", access("command", command="/nowhere/pdu")).state()
    assert message.value.trouble is Trouble.UNREACHABLE


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("printf '\\377\\033[2J'; exit 1", "refuses"),
        ("printf 'on\\377'", ""),
        ("yes", "printed more than"),
        ("sleep 60 & wait", "did not end in 1 s"),
        ("sleep 60 & echo on", ""),
        ("exec 2>&- 1>&-; sleep 60", "did not end in 1 s"),
    ],
)
def test_a_misbehaving_program_is_one_sentence(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid UTF-8, too much output, no end, children that keep its output open; for both kinds of programs."""
    for module in (power_command, power_ipmi):
        monkeypatch.setattr(module, "_TIMEOUT_S", 1)
    program = tmp_path / "ipmitool"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    for bmc in (
        kinds.connect("gpu-1", access("command", command=str(program))),
        kinds.connect("gpu-1", access("ipmi", "10.0.0.8")),
    ):
        found = problem_of(bmc.state)
        assert (found is None) is (not message)
        assert found is None or message in str(found)
        assert found is None or str(found).isprintable()
    assert time.monotonic() - began < 8


def test_a_program_that_has_ended_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended between its last output and the check: the error stays the same, without a traceback."""

    def read(process: subprocess.Popen[bytes], *_: object) -> tuple[str, str]:
        process.wait()
        raise power_program.Failed("printed more than 64 KiB")

    monkeypatch.setattr(power_program, "_read", read)
    with pytest.raises(power_program.Failed, match="printed more"):
        power_program.run(["true"], 5)


@pytest.mark.parametrize("command", ["'", " ", "x 'y"])
def test_an_invalid_command_is_wrong_input(command: str) -> None:
    with pytest.raises(WrongInput, match="gpunodes_bmc_command"):
        kinds.connect("gpu-1", access("command", command=command))


def of(**given: object) -> dict[str, Any]:
    return settings.resolve({f"gpunodes_bmc_{name}": value for name, value in given.items()})


def test_sources_of_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.access("gpu-1", of()) is None
    base = {"type": "redfish", "address": "10.0.0.9", "user": "admin"}
    vault = kinds.access("gpu-1", of(**base, password="in the vault"))
    assert vault is not None
    assert vault.password == "in the vault"
    assert "vault" not in repr(vault)
    monkeypatch.setenv("BMC_SECRET", "in the environment")
    env = kinds.access("gpu-1", of(**base, password_env="BMC_SECRET"))
    assert env is not None
    assert env.password == "in the environment"
    command = kinds.access("gpu-1", of(**base, password_command='echo "of $GPUNODES_MACHINE"; echo more'))
    assert command is not None
    assert command.password == "of gpu-1"


@pytest.mark.long
def test_passwords_in_vaults(tmp_path: Path) -> None:
    """A whole file and a single value, decrypted with the password file of Ansible's settings only."""
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "group_vars" / "all").mkdir(parents=True)
    (tmp_path / "key").write_text("of the vault\n")
    (tmp_path / "hosts.yml").write_text(
        "workers: {hosts: {a: {ansible_host: 10.0.0.1}, b: {ansible_host: 10.0.0.2}}}\n"
    )
    vault = [str(Path(sys.executable).with_name("ansible-vault")), "--vault-password-file", str(tmp_path / "key")]
    whole = tmp_path / "group_vars" / "all" / "vault.yml"
    whole.write_text("vault_password: in a file\n")
    subprocess.run([vault[0], "encrypt", *vault[1:], str(whole)], check=True, capture_output=True)
    words = [vault[0], "encrypt_string", *vault[1:], "in a value", "--name", "gpunodes_bmc_password"]
    single = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    (tmp_path / "host_vars" / "a.yml").write_text('gpunodes_bmc_password: "{{ vault_password }}"\n')
    (tmp_path / "host_vars" / "b.yml").write_text(single)
    code = (
        "from pathlib import Path\nfrom gpunodes.inventory import Inventory\ninventory = Inventory(Path('hosts.yml'))\n"
        "print([inventory.rendered(name, 'gpunodes_bmc_')['gpunodes_bmc_password'] for name in 'ab'])\n"
    )
    environment = {**os.environ, "ANSIBLE_VAULT_PASSWORD_FILE": str(tmp_path / "key")}

    def run() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert done.stdout == "['in a file', 'in a value']\n", done.stderr
    del environment["ANSIBLE_VAULT_PASSWORD_FILE"]
    done = run()
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "telepathy"}, "telepathy"),
        ({"type": "redfish"}, "gpunodes_bmc_address"),
        ({"type": "command"}, "gpunodes_bmc_command"),
        ({"type": "ipmi", "address": "x", "password_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_invalid_settings_are_wrong_input(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        kinds.access("gpu-1", of(**given))


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_is_a_choice_of_the_setting(kind: str) -> None:
    assert list(settings.problems({"gpunodes_bmc_type": kind})) == [], "add it to the choices of gpunodes_bmc_type"
    mac = "52:54:00:12:34:56"
    found = kinds.access("gpu-1", of(type=kind, address="10.0.0.9", command="/bin/true", mac=mac))
    assert found is not None
    bmc = kinds.connect("gpu-1", found)
    assert type(bmc).__module__.rpartition(".")[2] == kind


def test_the_output_of_a_failed_password_command_is_not_shown() -> None:
    with pytest.raises(GpunodesError) as message:
        kinds.access("gpu-1", of(type="ipmi", address="x", password_command="echo half-a-secret; exit 3"))
    assert "half-a-secret" not in str(message.value)
    assert "exit status 3" in str(message.value)
