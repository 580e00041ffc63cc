"""Commands that take addresses: without an inventory, or with --user, --key and --port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gpunodes.cli import bmc_settings, connections, terminal
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory, addressed
from gpunodes.model import Kubeconfig, Machine, Role
from gpunodes.operations import power

from tests import redfish, sshd
from tests.command import run

HOSTS = "control_plane: {hosts: {c1: }}\nworkers: {hosts: {gpu-1: {ansible_host: 10.0.0.5}}}\n"
NOTHING = connections.Connection({})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a process: its files end with it."""
    return subprocess.run(
        [sys.executable, "-c", "from gpunodes.cli import main; main()", *words],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def test_an_inventory_is_read_unless_there_is_none_or_a_connection_is_given(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    found, is_addressed = connections.inventory(path, ["10.0.0.5", "fd00::1"], NOTHING)
    assert is_addressed
    assert [(each.address, each.role) for each in found.machines()] == [
        ("10.0.0.5", Role.WORKER),
        ("fd00::1", Role.WORKER),
    ]
    path.write_text(HOSTS)
    found, is_addressed = connections.inventory(path, ["10.0.0.5"], NOTHING)
    assert not is_addressed
    assert [each.name for each in found.select(["10.0.0.5"])] == ["gpu-1"]
    found, is_addressed = connections.inventory(path, ["gpu-9.example"], connections.Connection({"ansible_port": 2222}))
    assert is_addressed
    assert found.machines() == [Machine("gpu-9.example", "gpu-9.example", Role.WORKER)]
    assert found.connection("gpu-9.example")["ansible_port"] == 2222


@pytest.mark.parametrize(
    ("machines", "message"),
    [([], "without a machine"), (["gpu-*"], "is not an address"), (["10.0.0.5", "10.0.0.5"], "each address once")],
)
def test_only_addresses_are_machines(tmp_path: Path, machines: list[str], message: str) -> None:
    if machines == ["10.0.0.5", "10.0.0.5"]:
        assert len(addressed.inventory(machines, {}).machines()) == 1
        machines = ["GPU-1", "gpu-1"]
    with pytest.raises(WrongInput, match=message):
        connections.inventory(tmp_path / "none", machines, connections.Connection({"ansible_user": "root"}))


def test_their_history_has_a_key_of_its_own() -> None:
    kubeconfig = Kubeconfig(Path("/k"), "prod")
    assert addressed.inventory(["10.0.0.5"], {}).cluster == "addresses"
    assert addressed.inventory(["10.0.0.6"], {}, kubeconfig).cluster == "addresses /k prod"
    assert InventoryFleet(addressed.inventory(["10.0.0.5"], {}, kubeconfig)).settings()["gpunodes_bmc_type"] == ""


def test_all_sessions_of_a_command_lead_to_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current context of the file may be changed between two of them."""
    monkeypatch.setattr(control_planes, "_CONFIRMED", {})
    inventory = addressed.inventory(["10.0.0.5"], {}, Kubeconfig(Path("/k")))
    made: list[ByKubeconfig] = []
    monkeypatch.setattr(control_planes, "Session", made.append)
    for _ in range(2):
        control_planes.session(inventory)
    assert made[0].is_known("u-1")
    assert made[1].is_known("u-1")
    assert not made[1].is_known("u-2")


def test_the_file_has_no_password_and_ends_with_the_process(tmp_path: Path) -> None:
    """Nor is a password a template."""
    found = addressed.inventory(["10.0.0.5"], {}, settings={"gpunodes_bmc_password": "{{ 7 * 7 }}"})
    assert found.rendered("10.0.0.5", "gpunodes_bmc_") == {"gpunodes_bmc_password": "{{ 7 * 7 }}"}
    assert "7" not in found.path.read_text()
    assert found.path.parent.stat().st_mode & 0o777 == 0o700
    done = process(tmp_path, "health", "127.0.0.1", "--port", "1", "--deadline", "5")
    assert done.returncode == 3, done.stderr
    assert "127.0.0.1" in done.stdout
    assert "unreachable" in done.stdout
    assert list(tmp_path.glob("gpunodes-*")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("repair", "10.0.0.5", "--yes"), "add --kubeconfig FILE, or --without-cluster"),
        (("health", "10.0.0.5", "--reboot-hung", "--yes", "--user", "root"), "add --kubeconfig FILE"),
        (("repair", "10.0.0.5", "--yes", "--kubeconfig", "none"), "the kubeconfig none cannot be read"),
        (("health", "--user", "root"), "without a machine"),
        (("health", "--from", "x", "--user", "root"), "no --user, --key or --port"),
        (("preflight", "gpu-1"), "there is no inventory"),
        (("preflight", "10.0.0.5", "--user", "a b"), "is not a user name"),
        (("gpu", "plan", "10.0.0.5", "--key", "none"), "the key none cannot be read"),
        (("power", "10.0.0.5", "status"), "has no BMC"),
        (("power", "10.0.0.5", "status", "--bmc", "type=redfish", "--bmc", "password=x"), "no password in the arg"),
        (("power", "10.0.0.5", "status", "--bmc", "type=magic"), "one of"),
        (("power", "10.0.0.5", "off", "--drain", "--yes"), "--drain for an address"),
        (("power", "10.0.0.5", "status", "--bmc", "colour=red"), "NAME=VALUE"),
    ],
)
def test_wrong_input_ends_with_2(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, *words, variables={"HOME": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "a bug in gpunodes" not in done.stderr


def test_the_bmc_s_password_is_asked_for_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "secret", lambda _: "asked")
    monkeypatch.delenv(bmc_settings.PASSWORD, raising=False)
    words = ["type=ipmi", "address=10.0.9.5", "verify=false"]
    assert bmc_settings.parsed(words) == {
        "gpunodes_bmc_type": "ipmi",
        "gpunodes_bmc_address": "10.0.9.5",
        "gpunodes_bmc_verify": False,
        "gpunodes_bmc_password": "asked",
    }
    monkeypatch.setenv(bmc_settings.PASSWORD, "x")
    assert bmc_settings.parsed(words)["gpunodes_bmc_password_env"] == bmc_settings.PASSWORD
    assert "gpunodes_bmc_password" not in bmc_settings.parsed(words)
    assert bmc_settings.parsed([]) == {}


@pytest.mark.long
def test_the_bmc_of_an_address_is_asked_and_switches_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODES_BMC_PASSWORD", "secret")
    resets: list[str] = []
    with redfish.fake("obeys", resets=resets) as server:
        bmc = {"type": "redfish", "address": f"http://127.0.0.1:{server.server_port}", "user": "admin"}
        words = [word for name, value in bmc.items() for word in ("--bmc", f"{name}={value}")]
        states = []
        for action in ("status", "on", "status"):
            done = process(tmp_path, "power", "127.0.0.9", action, *words, "--json")
            assert done.returncode == 0, done.stderr
            states.append(json.loads(done.stdout)["state"])
        server.shutdown()
    assert (states, resets) == (["off", "on", "on"], ["On"])
    assert not list(tmp_path.glob("gpunodes-*")), "a file with what was given is left"


def test_no_power_is_switched_with_a_kubeconfig_that_cannot_be_used(tmp_path: Path) -> None:
    """Only a cluster that is down, or none, leaves the machine unlocked."""
    reported: list[str] = []

    def switch(kubeconfig: Kubeconfig | None) -> None:
        fleet = InventoryFleet(addressed.inventory(["10.0.0.5"], {}, kubeconfig))
        action = power.PowerAction.OFF
        with power.locked(fleet, fleet.all_machines()[0], action, lambda _, text: reported.append(text)) as lost:
            assert lost() is None

    with pytest.raises(WrongInput):
        switch(Kubeconfig(tmp_path / "none"))
    assert reported == []
    switch(None)
    assert reported == ["no lock: 10.0.0.5: of machines without an inventory the control plane is not known"]


@pytest.mark.parametrize("kubeconfig", [None, Kubeconfig(Path("/k"))])
def test_messages_name_what_was_typed_and_no_temporary_file(kubeconfig: Kubeconfig | None) -> None:
    found = addressed.inventory([f"10.0.0.{number}" for number in range(1, 8)], {}, kubeconfig)
    calls: list[Callable[[], object]] = [
        found.control_planes,
        lambda: found.select(["nowhere"]),
        lambda: found.select([], Role.GPU_HOST),
        lambda: found.select(["10.0.0.1"], Role.GPU_HOST),
    ]
    for call in calls:
        with pytest.raises(WrongInput) as error:
            call()
        assert "10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5 and 2 more" in str(error.value)
        assert "addresses.yml" not in str(error.value)


def test_an_inventory_of_addresses_is_an_ordinary_one() -> None:
    """Ansible reads it, too."""
    found = addressed.inventory(["10.0.0.5"], {"ansible_user": "root"})
    assert Inventory(found.path).variables("10.0.0.5")["ansible_user"] == "root"


@pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)
def test_a_machine_of_no_inventory_is_scanned_over_ssh(tmp_path: Path) -> None:
    """This machine, with whatever GPUs it has; an inventory beside it is not read."""
    port = sshd.free_ports(1)[0]
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text("no inventory\n")
    with sshd.serving(tmp_path, [{("127.0.0.1", port): ""}]) as servers:
        words = ("--user", "root", "--port", str(port), "--key", str(servers.login))
        done = process(tmp_path, "health", "127.0.0.1", *words, "--json")
    assert done.returncode in {0, 3}, done.stderr
    (machine,) = json.loads(done.stdout)["machines"]
    assert machine["name"] == "127.0.0.1"
    assert machine["state"] != "unreachable", machine
