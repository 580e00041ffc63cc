"""Power: sushy-tools' Redfish emulator with its fake driver, BMCs that misbehave, ipmitool and commands of a user."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.engine import power
from gpunodes.engine.power import Access, Order, PowerProblem, PowerState, Trouble
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
    """sushy-tools' emulator, as it is, over its fake driver; its address."""
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
    bmc = power.connect("gpu-1", access(address=emulator))
    power.change(bmc, Order.ON, 15, 0.1)
    assert bmc.state() is PowerState.ON
    bmc.order(Order.RESET)
    power.change(bmc, Order.OFF, 15, 0.1)
    assert bmc.state() is PowerState.OFF
    power.change(bmc, Order.OFF, 15, 0.1)


def test_a_wrong_password_is_said_and_not_shown(emulator: str) -> None:
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access(address=emulator, password="wrong secret")).state()
    assert said.value.trouble is Trouble.LOGIN
    assert "wrong secret" not in str(said.value)


def test_a_system_that_is_not_there_is_named(emulator: str) -> None:
    with pytest.raises(PowerProblem, match=UUID):
        power.connect("gpu-1", access(address=emulator, system="none")).state()
    assert power.connect("gpu-1", access(address=emulator, system=UUID)).state() in set(PowerState)


def test_a_bmc_that_is_down() -> None:
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access(address=f"http://127.0.0.1:{free_port()}")).state()
    assert said.value.trouble is Trouble.DOWN


@pytest.mark.parametrize(("manner", "trouble"), [("lies", Trouble.LIED), ("refuses", Trouble.REFUSED)])
def test_a_bmc_that_lies_and_one_that_refuses_are_told_apart(manner: str, trouble: Trouble) -> None:
    server = redfish.fake(manner)
    bmc = power.connect("gpu-1", access(address=f"http://127.0.0.1:{server.server_port}", user="", password=""))
    with pytest.raises(PowerProblem) as said:
        power.change(bmc, Order.ON, 0.5, 0.1)
    assert said.value.trouble is trouble
    server.shutdown()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "bmc.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=bmc", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", str(path), "-out", str(tmp_path / "cert")], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "cert").read_text())
    return path


def test_tls_is_verified_unless_the_inventory_says_otherwise(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = redfish.fake("lies", context)
    address = f"127.0.0.1:{server.server_port}"
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access(address=address, user="", password="")).state()
    assert said.value.trouble is Trouble.TLS
    for verify in (False, str(certificate)):
        assert power.connect("gpu-1", access(address=address, user="", password="", verify=verify)).state() is (
            PowerState.OFF
        )
    server.shutdown()


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
    """A stand-in for ipmitool, which is not on every machine: it takes the same words."""
    program = tmp_path / "bin" / "ipmitool"
    program.parent.mkdir()
    program.write_text(IPMITOOL)
    program.chmod(0o755)
    (tmp_path / "state").write_text("off\n")
    for name, value in {"LOG": "log", "STATE": "state"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_ipmi_keeps_the_password_out_of_its_arguments(ipmitool: Path) -> None:
    bmc = power.connect("gpu-1", access("ipmi", "10.0.0.8:6230"))
    power.change(bmc, Order.ON, 5, 0.1)
    assert bmc.state() is PowerState.ON
    log = (ipmitool / "log").read_text()
    assert "-H 10.0.0.8 -p 6230" in log
    assert PASSWORD not in log
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access("ipmi", "10.0.0.8", password="x")).state()
    assert said.value.trouble is Trouble.LOGIN
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access("ipmi", "10.0.0.9")).order(Order.RESET)
    assert said.value.trouble is Trouble.DOWN


def test_a_command_of_the_users_own(tmp_path: Path) -> None:
    program = tmp_path / "pdu"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = gpu-1 ] || {{ echo "who is $2?" >&2; exit 1; }}\n'
        f"case $1 in status) cat {tmp_path}/state;; *) echo $1 >{tmp_path}/state;; esac\n"
    )
    program.chmod(0o755)
    (tmp_path / "state").write_text("off\n")
    own = access("command", command=str(program))
    bmc = power.connect("gpu-1", own)
    power.change(bmc, Order.ON, 5, 0.1)
    assert bmc.state() is PowerState.ON
    with pytest.raises(PowerProblem, match=r"who is gpu-2\?") as said:
        power.connect("gpu-2", own).order(Order.OFF)
    assert said.value.trouble is Trouble.REFUSED
    with pytest.raises(PowerProblem) as said:
        power.connect("gpu-1", access("command", command="/nowhere/pdu")).state()
    assert said.value.trouble is Trouble.DOWN


def of(**given: object) -> dict[str, Any]:
    return settings.of({f"gpunodes_bmc_{name}": value for name, value in given.items()})


def test_where_a_password_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert power.access("gpu-1", of()) is None
    base = {"type": "redfish", "address": "10.0.0.9", "user": "admin"}
    vault = power.access("gpu-1", of(**base, password="in the vault"))
    assert vault is not None
    assert vault.password == "in the vault"
    assert "vault" not in repr(vault)
    monkeypatch.setenv("BMC_SECRET", "in the environment")
    env = power.access("gpu-1", of(**base, password_env="BMC_SECRET"))
    assert env is not None
    assert env.password == "in the environment"
    command = power.access("gpu-1", of(**base, password_command='echo "of $GPUNODES_MACHINE"; echo more'))
    assert command is not None
    assert command.password == "of gpu-1"


def test_passwords_in_vaults(tmp_path: Path) -> None:
    """A whole file and a single value, read with the password file that Ansible's settings name, and not without."""
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
    ("given", "said"),
    [
        ({"type": "telepathy"}, "telepathy"),
        ({"type": "redfish"}, "gpunodes_bmc_address"),
        ({"type": "command"}, "gpunodes_bmc_command"),
        ({"type": "ipmi", "address": "x", "password_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_settings_that_cannot_be_used_are_wrong_input(given: dict[str, str], said: str) -> None:
    with pytest.raises(WrongInput, match=said):
        power.access("gpu-1", of(**given))


def test_a_password_command_that_fails_shows_nothing_of_what_it_printed() -> None:
    with pytest.raises(GpunodesError) as said:
        power.access("gpu-1", of(type="ipmi", address="x", password_command="echo half-a-secret; exit 3"))
    assert "half-a-secret" not in str(said.value)
    assert "exit status 3" in str(said.value)
