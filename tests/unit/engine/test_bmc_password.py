"""New passwords of BMCs: a Redfish service with accounts, which checks every login, and a stand-in for ipmitool."""

from __future__ import annotations

import base64
import contextlib
import json
import stat
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine.cluster.errors import NoSession
from gpunodes.engine.machine_control import MachineControl
from gpunodes.engine.power import Access, PowerProblem, Trouble, kinds, passwords
from gpunodes.errors import WrongInput
from gpunodes.identity.model import MachineIdentity
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import bmc_password
from gpunodes.operations.autoscale.objects import Objects

from tests import redfish

OLD = "old-Secret.1"
ACCOUNTS = "/redfish/v1/AccountService/Accounts"


class _Bmc(BaseHTTPRequestHandler):
    """A Redfish service with one system and accounts by path; it requires a login everywhere but at the root."""

    accounts: dict[str, dict[str, str]]
    refusal: Mapping[str, Any] | None = None
    hardware: Mapping[str, str] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        root = {**redfish.DOCUMENTS[redfish.ROOT], "AccountService": {"@odata.id": "/redfish/v1/AccountService"}}
        documents: dict[str, Any] = {
            **redfish.DOCUMENTS,
            redfish.ROOT: root,
            redfish.SYSTEM: {**redfish.DOCUMENTS[redfish.SYSTEM], "PowerState": "On", **self.hardware},
            "/redfish/v1/AccountService": {"Accounts": {"@odata.id": ACCOUNTS}},
            ACCOUNTS: {"Members": [{"@odata.id": path} for path in self.accounts]},
            **{path: {"UserName": each["UserName"], "Password": None} for path, each in self.accounts.items()},
        }
        path = redfish.ROOT if self.path == redfish.ROOT.rstrip("/") else self.path
        if path == redfish.ROOT or self.allowed():
            self.answer(200 if path in documents else 404, documents.get(path, {}))

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.allowed():
            if self.refusal is not None:
                self.answer(400, {"error": {"message": f"not {body['Password']}", "code": "Base.1.0.GeneralError"}})
                return
            self.accounts[self.path].update(body)
            self.answer(200, {})

    def allowed(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        logins = (f"{each['UserName']}:{each['Password']}" for each in self.accounts.values())
        allowed = base64.b64decode(given).decode() in set(logins)
        if not allowed:
            self.answer(401, {"error": {"code": "Base.1.0.NoValidSession", "message": "no login"}})
        return allowed

    def answer(self, status: int, document: Mapping[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Service:
    def __init__(self) -> None:
        self.accounts = {
            f"{ACCOUNTS}/1": {"UserName": "root", "Password": "of-root"},
            f"{ACCOUNTS}/2": {"UserName": "admin", "Password": OLD},
        }
        self.handler = type("Bmc", (_Bmc,), {"accounts": self.accounts})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def control(self, **more: Any) -> MachineControl:
        settings = {
            "gpunodes_bmc_type": "redfish",
            "gpunodes_bmc_address": f"http://127.0.0.1:{self.server.server_port}",
            "gpunodes_bmc_user": "admin",
            "gpunodes_bmc_password": OLD,
            "gpunodes_bmc_identity": "any",
        }
        return MachineControl("gpu-1", "127.0.0.1", {**settings, **more}, 0.0)


@pytest.fixture
def service() -> Iterator[_Service]:
    found = _Service()
    yield found
    found.server.shutdown()


def test_the_password_of_this_account_alone_is_changed(service: _Service) -> None:
    bmc = service.control().own_power()
    bmc.change_password("New.secret-22")
    assert [each["Password"] for each in service.accounts.values()] == ["of-root", "New.secret-22"]
    with pytest.raises(PowerProblem) as refused:
        service.control().own_power().state()
    assert refused.value.trouble is Trouble.LOGIN
    assert service.control().with_password("New.secret-22").own_power().state() == "on"


def test_a_bmc_that_was_changed_before_is_only_verified(service: _Service) -> None:
    """A command that was killed after the change continues with the file that it wrote before it."""
    control = service.control(gpunodes_bmc_identity="check")
    service.accounts[f"{ACCOUNTS}/2"]["Password"] = "New.secret-22"
    renewed = MachineControl("gpu-1", "127.0.0.1", control._variables, 0.0, named=True).with_password("New.secret-22")
    assert bmc_password._login(control, renewed) is None
    service.accounts[f"{ACCOUNTS}/2"]["Password"] = "a-third-one"
    with pytest.raises(PowerProblem) as refused:
        bmc_password._login(control, renewed)
    assert refused.value.trouble is Trouble.LOGIN


def test_the_bmc_is_compared_with_the_identity_that_the_machine_reports_now(
    service: _Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a new controller nothing is recorded before, and the BMC of another machine would be used."""
    service.handler.hardware = {"UUID": "deadbeef-0042-4810-8052-b2c04f595331"}  # type: ignore[attr-defined]  # a field of _Bmc
    known: list[MachineIdentity] = []

    class Fleet:
        cluster_name = "c"

        def scan(self, machines: list[Machine]) -> None:
            known.append(MachineIdentity(machines[0].name, system_uuid="4c4c4544-0042-4810-8052-b2c04f595331"))

        def machine_control(self, machine: Machine, **more: Any) -> MachineControl:
            variables = service.control(gpunodes_bmc_identity="check")._variables
            return MachineControl(machine.name, machine.address, variables, 0.0, *known, **more)

    fleet: Any = Fleet()
    monkeypatch.setattr(bmc_password, "locked", lambda *_: contextlib.nullcontext(lambda: None))
    machine = Machine("gpu-1", "127.0.0.1", Role.WORKER)
    with pytest.raises(PowerProblem, match="belongs to another machine"):
        bmc_password.rotate(fleet, machine, tmp_path / "new", named=True, report=lambda *_: None)
    assert service.accounts[f"{ACCOUNTS}/2"]["Password"] == OLD


@pytest.mark.parametrize(
    ("pools", "installed", "role", "told"),
    [
        ({}, False, Role.WORKER, False),
        ({"h100": {"min": 0, "max": 2}}, False, Role.WORKER, True),
        ({}, True, Role.WORKER, True),
        ({}, None, Role.WORKER, False),
        ({}, True, Role.CONTROL_PLANE, False),
    ],
)
def test_the_autoscaler_has_the_old_password_until_it_is_told(
    service: _Service,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pools: Any,
    installed: bool | None,
    role: Role,
    told: bool,
) -> None:
    """By the settings, or by its Deployment, if the cluster responds (not with None)."""
    path = tmp_path / "hosts.yml"
    variables = {"gpunodes_pools": pools}
    groups = {"control_plane": {"hosts": {"cp-1": {}}}, "workers": {"hosts": {"gpu-1": {}}, "vars": variables}}
    path.write_text(json.dumps(groups))

    class Fleet:
        cluster_name, inventory = "c", Inventory(path)

        def scan(self, _: Any) -> None:
            pass

        def session(self) -> Any:
            if installed is None:
                raise NoSession("it does not respond")
            return contextlib.nullcontext()

        def machine_control(self, *_: Any, **__: Any) -> MachineControl:
            return service.control()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(bmc_password, "locked", lambda *_: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr(contextlib, "closing", lambda session: session)
    monkeypatch.setattr(Objects, "is_installed", lambda _: installed)
    lines: list[str] = []
    fleet: Any = Fleet()
    machine = Machine("gpu-1", "127.0.0.1", role)
    bmc_password.rotate(fleet, machine, tmp_path / "new", named=True, report=lambda _, text: lines.append(text))
    assert any("autoscale up" in line for line in lines) is told
    assert service.accounts[f"{ACCOUNTS}/2"]["Password"] == (tmp_path / "new").read_text().strip()


def test_a_refusal_that_quotes_the_password_is_shown_without_it(service: _Service) -> None:
    service.handler.refusal = {}  # type: ignore[attr-defined]  # a field of _Bmc
    with pytest.raises(PowerProblem, match="does not change its password") as refused:
        service.control().own_power().change_password("New.secret-22")
    assert "New.secret-22" not in str(refused.value)


def test_two_accounts_of_one_name_are_refused(service: _Service) -> None:
    service.accounts[f"{ACCOUNTS}/1"]["UserName"] = "admin"
    with pytest.raises(PowerProblem, match="2 accounts with the name 'admin'"):
        service.control().own_power().change_password("New.secret-22")
    assert service.accounts[f"{ACCOUNTS}/2"]["Password"] == OLD


IPMITOOL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/arguments"
for last in "$@"; do :; done
case "$*" in
  *"user list"*) printf 'ID  Name\\t Callin\\n1   root   true\\n3   admin  true    false\\n' ;;
  *" exec "*) stat -c %a "$last" >> "$(dirname "$0")/modes"; cat "$last" >> "$(dirname "$0")/commands" ;;
esac
"""


def test_ipmi_gets_the_new_password_in_a_file_that_others_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ipmitool"
    program.write_text(IPMITOOL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    bmc = kinds.connect("gpu-1", Access("ipmi", "127.0.0.1", "admin", OLD))
    bmc.change_password("New.secret-22")
    bmc.change_password("New.secret-of-20byte")
    lines = (tmp_path / "commands").read_text().splitlines()
    assert lines == ["user set password 3 New.secret-22 16", "user set password 3 New.secret-of-20byte 20"]
    assert set((tmp_path / "modes").read_text().split()) == {"600"}
    arguments = (tmp_path / "arguments").read_text()
    assert "New.secret" not in arguments
    assert not Path(arguments.splitlines()[1].split()[-1]).exists()
    with pytest.raises(PowerProblem, match="0 users with the name"):
        kinds.connect("gpu-1", Access("ipmi", "127.0.0.1", "nobody", OLD)).change_password("New.secret-22")


def test_a_command_has_no_password() -> None:
    with pytest.raises(WrongInput, match="gets no password"):
        kinds.connect("gpu-1", Access("command", "", "", "", command="/bin/true")).change_password("New.secret-22")


def test_a_random_password_is_written_before_it_is_used_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new"
    made = passwords.new(path)
    assert passwords.PATTERN.fullmatch(made)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert passwords.new(path) == made == path.read_text().strip()


@pytest.mark.parametrize(
    "content",
    ["", "short\n", "with space in it\n", 'quo"te-quote\n', "-starts-badly\n", "two\nlines-of-it\n", "x" * 21],
)
def test_a_file_without_a_password_that_bmcs_take_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "new"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(WrongInput, match="no password that BMCs take"):
        passwords.new(path)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new"
    path.write_text("Long.enough-1\n")
    path.chmod(0o644)
    with pytest.raises(WrongInput, match="mode 0644"):
        passwords.new(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(WrongInput, match="cannot be read"):
        passwords.new(link)
