"""Host keys: neither the scan nor ssh accepts a key that the user's own ssh refuses. On real SSH servers."""

from __future__ import annotations

import base64
import configparser
import contextlib
import json
import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import settings
from gpunodes.engine import runner
from gpunodes.engine.remote import openssh, probing, shell
from gpunodes.engine.remote.commands import RemoteCommand
from gpunodes.engine.remote.hostkeys import HostKeys, Trust
from gpunodes.engine.remote.reach import ProbeResult, Reach
from gpunodes.engine.remote.targets import ARGUMENTS, ssh_config, target
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory

from tests import sshd

pytestmark = pytest.mark.long

needs_sshd = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


def public(path: Path) -> str:
    """The type and the public key of a key pair."""
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def certify(authority: Path, key: Path, name: str, *more: str) -> None:
    words = [
        "ssh-keygen",
        "-q",
        "-z",
        "7",
        "-s",
        str(authority),
        "-I",
        "host",
        "-h",
        "-n",
        name,
        *more,
        str(key.with_suffix(".pub")),
    ]
    subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sshd.new_key(tmp_path_factory.mktemp("authority") / "ca")


CERTIFICATES = {
    "none": (),
    "good": ("127.0.0.1", "-V", "always:forever"),
    "pattern": ("127.0.0.*", "-V", "always:forever"),
    "another name": ("gpu-2", "-V", "always:forever"),
    "expired": ("127.0.0.1", "-V", "20200101:20210101"),
}


@pytest.fixture(scope="module")
def ports(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, sshd.Servers]]]:
    """One server for each kind of certificate."""

    def prepare(message: tuple[str, ...]) -> Callable[[sshd.Servers], str]:
        def lines(servers: sshd.Servers) -> str:
            if not message:
                return ""
            certify(authority, servers.host_key, *message)
            return f"HostCertificate {servers.host_key}-cert.pub\n"

        return lines

    with contextlib.ExitStack() as stack:
        found = {}
        for (name, message), port in zip(CERTIFICATES.items(), sshd.free_ports(len(CERTIFICATES)), strict=True):
            folder = tmp_path_factory.mktemp("server")
            served = sshd.serving(folder, [{("127.0.0.1", port): ""}], prepare(message))
            found[name] = (port, stack.enter_context(served))
        yield found


class Site:
    """The user's ssh_config and known_hosts, and connections of gpunodes that use them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        for name in ("SSH_AUTH_SOCK", *(name.upper() for name in ARGUMENTS)):
            monkeypatch.delenv(name, raising=False)
        (folder / ".ssh").mkdir()
        self.config = folder / ".ssh/config"
        self.known_hosts = folder / ".ssh/known_hosts"
        self.config.write_text("")

    def variables(self, port: int, servers: sshd.Servers, **more: Any) -> dict[str, Any]:
        return {
            "ansible_host": "127.0.0.1",
            "ansible_port": port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(servers.login),
            # ssh takes the home of passwd, whatever $HOME says.
            "ansible_ssh_common_args": f"-F {self.config}",
            **more,
        }

    def probed(self, variables: dict[str, Any]) -> ProbeResult:
        found = target("gpu-1", variables, ssh_config())
        (answer,) = probing.probe([found], probing.ProbeSettings(), deadline_s=60)
        return answer

    def refuses(self, variables: dict[str, Any]) -> bool:
        """Whether the scan and gpunodes' ssh both refuse, in either order, and no key is learned."""
        before = self.learned()
        tries = [self.connected(variables), self.probed(variables).reach is Reach.ANSWERED, self.connected(variables)]
        return not any(tries) and self.learned() == before

    def connects_by_itself(self, variables: dict[str, Any]) -> bool:
        """Whether the user's own ssh does."""
        words = ["-p", str(variables["ansible_port"]), "-i", variables["ansible_ssh_private_key_file"]]
        for name in ("ansible_ssh_args", "ansible_ssh_common_args"):
            words += shlex.split(variables.get(name, ""))
        words = ["ssh", "-o", "BatchMode=yes", *words, "root@127.0.0.1", "true"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def connected(self, variables: dict[str, Any]) -> bool:
        return shell.run("127.0.0.1", variables, RemoteCommand("echo"), deadline_s=30).ok

    def learned(self) -> str:
        path = settings.known_hosts()
        return path.read_text() if path.exists() else ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@needs_sshd
@pytest.mark.parametrize("word", ["yes", "ask"])
def test_an_unknown_key_is_not_learned_where_the_user_forbids_it(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], word: str
) -> None:
    """Both learned it, regardless of ssh_config."""
    variables = site.variables(*ports["none"])
    site.config.write_text(f"Host 127.0.0.*\n  StrictHostKeyChecking {word}\n  UserKnownHostsFile {site.known_hosts}\n")
    answer = site.probed(variables)
    assert answer.reach is Reach.KEY_UNKNOWN
    assert "is not known" in answer.message
    assert not site.connected(variables)
    assert site.learned() == ""
    site.known_hosts.write_text(f"[127.0.0.1]:{ports['none'][0]} {public(ports['none'][1].host_key)}\n")
    assert site.probed(variables).reach is Reach.ANSWERED
    assert site.connected(variables)
    # A machine at another port may be known by its address alone.
    site.known_hosts.write_text(f"127.0.0.1 {public(ports['none'][1].host_key)}\n")
    assert site.probed(variables).reach is Reach.ANSWERED
    assert site.connected(variables)


OTHER = "[127.0.0.1]:{port} {other}\n"
FORBIDDEN = {
    "a comment behind it": ("StrictHostKeyChecking yes # rule 7\n", ""),
    "an equals sign": ('StrictHostKeyChecking = "yes"\n', ""),
    "an Include with a tab": ("Include\t{folder}/more\n", "StrictHostKeyChecking yes\n"),
    "an Include with a comment": ("Include {folder}/more # the site's own\n", "StrictHostKeyChecking yes\n"),
    "a word of an included file": ('Include "{folder}/more"\n', "StrictHostKeyChecking ask\n"),
    "a name with a blank": ('UserKnownHostsFile "{folder}/a b"\n', OTHER),
    "a variable": ("UserKnownHostsFile ${{HOME}}/more\n", OTHER),
    "the second file": ("UserKnownHostsFile {folder}/none {folder}/more\n", OTHER),
    "everybody's file": ("GlobalKnownHostsFile {folder}/more\n", OTHER),
    "everybody's authority": ("GlobalKnownHostsFile {folder}/more\n", "@cert-authority * {other}\n"),
    "a command": ("KnownHostsCommand /bin/cat {folder}/more\n", OTHER),
    "a command that revokes": ("KnownHostsCommand /bin/cat {folder}/more\n", "@revoked * {key}\n"),
    "a command with an authority": ("KnownHostsCommand /bin/cat {folder}/more\n", "@cert-authority * {other}\n"),
    "a command that fails": ("KnownHostsCommand /bin/false\n", ""),
    "an alias": ("HostKeyAlias gpu\nUserKnownHostsFile {folder}/more\n", "gpu {other}\n"),
}


@needs_sshd
@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_host_key_that_the_users_ssh_refuses_is_refused(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], tmp_path: Path, name: str
) -> None:
    """The scan ignored some options and learned the key; then gpunodes' ssh accepted it, too."""
    port, servers = ports["none"]
    message = {"folder": tmp_path, "port": port, "key": public(servers.host_key)}
    message["other"] = public(sshd.new_key(tmp_path / "other"))
    text, more = (each.format(**message) for each in FORBIDDEN[name])
    site.config.write_text(f"{text}UserKnownHostsFile {site.known_hosts}\n")
    for file in ("more", "a b"):
        (tmp_path / file).write_text(more)
    variables = site.variables(port, servers)
    assert not site.connects_by_itself(variables)
    assert site.refuses(variables)
    # Nor is it enough that the key was learned before.
    settings.known_hosts().write_text("".join(f"{each} {message['key']}\n" for each in (f"[127.0.0.1]:{port}", "gpu")))
    assert site.refuses(variables)


@needs_sshd
@pytest.mark.parametrize("variable", ["ansible_ssh_args", "ansible_ssh_common_args"])
def test_another_ssh_config_of_the_inventory_is_used(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], tmp_path: Path, variable: str
) -> None:
    """The scan read the user's file instead, and ansible_ssh_args was ignored."""
    (tmp_path / "site.conf").write_text(f"StrictHostKeyChecking yes\nUserKnownHostsFile {site.known_hosts}\n")
    more: dict[str, Any] = {"ansible_ssh_common_args": "", variable: f"-F {tmp_path}/site.conf"}
    variables = site.variables(*ports["none"], **more)
    assert not site.connects_by_itself(variables)
    assert site.refuses(variables)
    site.known_hosts.write_text(f"[127.0.0.1]:{ports['none'][0]} {public(ports['none'][1].host_key)}\n")
    assert site.probed(variables).reach is Reach.ANSWERED
    assert site.connected(variables)


@needs_sshd
def test_known_hosts_command(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], tmp_path: Path, authority: Path
) -> None:
    """The scan did not run KnownHostsCommand."""
    site.config.write_text(f"UserKnownHostsFile none\nKnownHostsCommand {tmp_path}/command %I %H %t %K %u %%\n")
    command = tmp_path / "command"
    line = '#!/bin/sh\necho "$@" >>{folder}/asked\necho "{marker} {name} {key}"\n'
    for certificate, marker, key in (("none", "", None), ("good", "@cert-authority", authority)):
        port, servers = ports[certificate]
        name = f"[127.0.0.1]:{port}"
        command.write_text(line.format(folder=tmp_path, marker=marker, name=name, key=public(key or servers.host_key)))
        command.chmod(0o700)
        variables = site.variables(port, servers)
        asked = []
        for connect in (
            site.connects_by_itself,
            lambda message: site.probed(message).reach is Reach.ANSWERED,
            site.connected,
        ):
            (tmp_path / "asked").write_text("")
            assert connect(variables)
            asked.append((tmp_path / "asked").read_text().splitlines())
        # The scan runs it as ssh does.
        assert asked[1][-1] == asked[0][-1]
        # Only by this name: ssh asks for no other.
        command.write_text(command.read_text().replace(name, "127.0.0.1"))
        assert not site.connects_by_itself(variables)
        assert site.refuses(variables)
    assert site.learned() == ""


@needs_sshd
@pytest.mark.parametrize("word", ["no", "off", "accept-new", ""])
def test_keys_are_learned_once_and_verified_without_rules_of_the_user(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], tmp_path: Path, word: str
) -> None:
    variables = site.variables(*ports["none"])
    site.config.write_text(f"StrictHostKeyChecking {word}\n" if word else "")
    assert site.probed(variables).reach is Reach.ANSWERED
    assert site.learned().count("\n") == 1
    other = public(sshd.new_key(tmp_path / "other"))
    settings.known_hosts().write_text(f"[127.0.0.1]:{ports['none'][0]} {other}\n")
    assert site.probed(variables).reach is Reach.KEY_CHANGED
    assert not site.connected(variables)


@needs_sshd
def test_the_arguments_of_the_inventory_are_used(site: Site, ports: dict[str, tuple[int, sshd.Servers]]) -> None:
    arguments = f"-o StrictHostKeyChecking=yes -F {site.config}"
    variables = site.variables(*ports["none"], ansible_ssh_common_args=arguments)
    assert site.probed(variables).reach is Reach.KEY_UNKNOWN
    assert not site.connected(variables)


@needs_sshd
def test_the_keys_of_the_system_are_used(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan did not read /etc/ssh/ssh_known_hosts."""
    port, servers = ports["none"]
    everywhere = tmp_path / "ssh_known_hosts"
    monkeypatch.setattr(openssh, "GLOBAL_KNOWN_HOSTS", (str(everywhere),))
    variables = site.variables(port, servers, ansible_ssh_common_args="")
    everywhere.write_text(f"[127.0.0.1]:{port} {public(sshd.new_key(tmp_path / 'other'))}\n")
    answer = site.probed(variables)
    assert (answer.reach, "correct it there" in answer.message) == (Reach.KEY_CHANGED, True)
    everywhere.write_text(f"@revoked * {public(servers.host_key)}\n")
    answer = site.probed(variables)
    assert (answer.reach, "is revoked" in answer.message) == (Reach.KEY_CHANGED, True)
    # And the files that ssh_config names.
    monkeypatch.setattr(openssh, "GLOBAL_KNOWN_HOSTS", ())
    variables = site.variables(port, servers)
    site.config.write_text(f"GlobalKnownHostsFile {everywhere}\nUserKnownHostsFile none\n")
    assert site.probed(variables).reach is Reach.KEY_CHANGED
    assert not site.connected(variables)
    revoked = tmp_path / "revoked"
    site.config.write_text(f"RevokedHostKeys {revoked}\n")
    assert site.probed(variables).reach is Reach.KEY_CHANGED
    for write in (
        lambda key: revoked.write_text(public(key)),
        lambda key: subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, key.with_suffix(".pub")], check=True),
    ):
        write(tmp_path / "other")
        assert site.probed(variables).reach is Reach.ANSWERED
        write(servers.host_key)
        assert site.probed(variables).reach is Reach.KEY_CHANGED


@needs_sshd
@pytest.mark.parametrize(
    ("name", "reach", "message"),
    [
        ("good", Reach.ANSWERED, ""),
        ("pattern", Reach.ANSWERED, ""),
        ("none", Reach.KEY_UNKNOWN, "certificate authority"),
        ("another name", Reach.KEY_CHANGED, "a certificate that is not valid"),
        ("expired", Reach.KEY_CHANGED, "a certificate that is not valid"),
    ],
)
@pytest.mark.parametrize("strict", ["", "StrictHostKeyChecking yes\n"])
def test_certificates_of_a_known_authority(
    site: Site,
    authority: Path,
    ports: dict[str, tuple[int, sshd.Servers]],
    name: str,
    reach: Reach,
    message: str,
    strict: str,
) -> None:
    """The scan ignored the lines of authorities, and learned any key."""
    site.known_hosts.write_text(f"@cert-authority 127.0.0.* {public(authority)}\n")
    site.config.write_text(f"UserKnownHostsFile {site.known_hosts}\n{strict}")
    variables = site.variables(*ports[name])
    answer = site.probed(variables)
    assert (answer.reach, message in answer.message) == (reach, True), answer.message
    if name != "pattern":
        assert site.connected(variables) is (reach is Reach.ANSWERED)
    assert site.learned() == ""


@needs_sshd
def test_a_certificate_of_an_unknown_authority_is_ignored(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], authority: Path, tmp_path: Path
) -> None:
    other = public(sshd.new_key(tmp_path / "other"))
    site.config.write_text(f"UserKnownHostsFile {site.known_hosts}\n")
    variables = site.variables(*ports["good"])
    site.known_hosts.write_text(f"@cert-authority 127.0.0.* {other}\n")
    assert site.probed(variables).reach is Reach.KEY_UNKNOWN
    assert not site.connected(variables)
    site.known_hosts.write_text(f"@cert-authority * {public(authority)}\n@revoked * {public(authority)}\n")
    assert site.probed(variables).reach is Reach.KEY_CHANGED
    assert not site.connected(variables)
    # Its key may still be known by itself.
    port, servers = ports["good"]
    site.known_hosts.write_text(f"@cert-authority * {other}\n[127.0.0.1]:{port} {public(servers.host_key)}\n")
    assert site.probed(variables).reach is Reach.ANSWERED


@needs_sshd
@pytest.mark.parametrize("how", ["authority", "key", "certificate", "KRL authority", "KRL serial", "KRL id", "missing"])
def test_a_revoked_certificate_is_refused(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]], authority: Path, tmp_path: Path, how: str
) -> None:
    """RevokedHostKeys was compared with the key only."""
    port, servers = ports["good"]
    site.known_hosts.write_text(f"@cert-authority 127.0.0.* {public(authority)}\n")
    revoked, request = tmp_path / "revoked", tmp_path / "request"
    site.config.write_text(f"UserKnownHostsFile {site.known_hosts}\nRevokedHostKeys {revoked}\n")
    variables = site.variables(port, servers)
    revoked.write_text(public(sshd.new_key(tmp_path / "other")))
    assert site.probed(variables).reach is Reach.ANSWERED
    key = servers.host_key.with_suffix(".pub")
    certificate = key.with_name(f"{servers.host_key.name}-cert.pub")
    texts = {"authority": public(authority), "key": public(servers.host_key), "certificate": certificate.read_text()}
    requested = {"KRL serial": "serial: 7\n", "KRL id": "id: host\n"}
    if how in texts:
        revoked.write_text(f"# the site's own\n{texts[how]}\n")
    elif how == "missing":
        revoked.unlink()
    else:
        request.write_text(requested.get(how, ""))
        ca = authority.with_suffix(".pub")
        words = ["-s", ca, request] if how in requested else [ca]
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", revoked, *words], check=True)
    assert not site.connects_by_itself(variables)
    assert site.refuses(variables)
    assert "is revoked" in site.probed(variables).message


@needs_sshd
def test_a_known_hosts_file_without_a_final_line_break_is_repaired(
    site: Site, ports: dict[str, tuple[int, sshd.Servers]]
) -> None:
    """gpunodes and ssh both append to it."""
    port, servers = ports["none"]
    line = f"gpu-9 {public(servers.host_key)}"
    for connect in (site.probed, site.connected):
        settings.known_hosts().write_text(line)
        connect(site.variables(port, servers))
        first, *rest = settings.known_hosts().read_text().splitlines()
        assert (first, len(rest)) == (line, 1)


def test_a_known_hosts_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended every command with a traceback."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # root may write whatever has another mode.
    settings.known_hosts().mkdir()
    keys = HostKeys([settings.known_hosts()])
    assert [keys.judge("gpu-1", "ssh-ed25519", key) for key in (b"one", b"two")] == [Trust.UNKNOWN, Trust.UNKNOWN]
    assert openssh.options("gpu-1")


def test_a_complete_known_hosts_file_stays_unchanged(tmp_path: Path) -> None:
    for text in ("", "gpu-1 ssh-ed25519 AAAA\n"):
        (tmp_path / "known_hosts").write_text(text)
        keys = HostKeys([tmp_path / "known_hosts"])
        assert keys.judge("gpu-2", "ssh-ed25519", b"key") is Trust.NEW
        key = base64.b64encode(b"key").decode()
        assert (tmp_path / "known_hosts").read_text() == f"{text}gpu-2 ssh-ed25519 {key}\n"


def resolved_by_ssh(words: list[str]) -> dict[str, str]:
    """The options that ssh resolves for these arguments."""
    done = subprocess.run([words[0], "-G", *words[1:]], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def forwards(found: dict[str, str]) -> set[str]:
    """What ssh forwards, and runs on the controller."""
    harmless = {"no", "false"}
    names = ("forwardagent", "forwardx11", "permitlocalcommand", "tunnel", "localforward", "remoteforward")
    kept = {name for name in (*names, "dynamicforward") if found.get(name, "no") not in harmless}
    return kept - {"localforward", "remoteforward", "dynamicforward"} if found["clearallforwardings"] == "yes" else kept


FORWARDING = (
    "-A",
    "-X",
    "-Y",
    "-o ForwardAgent=yes",
    "-L 9999:localhost:1",
    "-R 9998:localhost:22",
    "-D 9997",
    "-w any",
)


def test_nothing_is_forwarded(site: Site) -> None:
    """Regardless of ssh_config and the inventory: root on a machine could use the agent and the ports."""
    site.config.write_text(
        "ForwardAgent yes\nForwardX11 yes\nLocalForward 9999 localhost:1\nRemoteForward 9998 localhost:1\n"
        "DynamicForward 9997\nPermitLocalCommand yes\nLocalCommand touch /tmp/x\nTunnel yes\nRemoteCommand true\n"
        "Host gpu-1\n  ProxyJump bastion\n"
    )
    found = resolved_by_ssh(shell.command("gpu-1", {"ansible_ssh_common_args": f"-F {site.config}"}))
    assert forwards(found) == set()
    assert found["proxyjump"] == "bastion"
    for words in FORWARDING:
        for name in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
            assert forwards(resolved_by_ssh(shell.command("gpu-1", {name: words}))) == set(), (name, words)
    ours = shlex.split(runner.environment(Path("/x"))["ANSIBLE_SSH_ARGS"])
    assert forwards(resolved_by_ssh(["ssh", *ours, "-F", str(site.config), "gpu-1"])) == set()


def resolved_by_ansible(path: Path, folder: Path) -> dict[str, dict[str, str]]:
    """The options that ssh resolves when Ansible starts it for each machine of an inventory."""
    sources = runner.inventories(Inventory(path), folder)
    assert sources[0] == str(path)
    program = str(Path(sys.executable).with_name("ansible-inventory"))
    words = [program, "--list", *(word for source in sources for word in ("-i", source))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = {}
    # Values that are no templates are marked.
    listed = json.loads(done.stdout, object_hook=lambda each: each.get("__ansible_unsafe", each))
    for machine, variables in listed["_meta"]["hostvars"].items():
        message = [variables.get("ansible_ssh_args", runner.environment(folder)["ANSIBLE_SSH_ARGS"])]
        for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
            message.append(variables.get(name, os.environ.get(name.upper(), "")))
        found[machine] = resolved_by_ssh(["ssh", *shlex.split(" ".join(message)), variables["ansible_host"]])
    return found


def test_ansible_gets_the_rules_of_each_machine(site: Site, tmp_path: Path) -> None:
    """All machines had the same options, which overrode the user's; the inventory's overrode them all."""
    site.config.write_text("Host 10.0.0.1\n  StrictHostKeyChecking yes\n")
    arguments = f"-F {site.config}"
    hosts: dict[str, dict[str, str]] = {"gpu-1": {}, "gpu-2": {"ansible_host": "10.0.0.2"}}
    hosts["gpu-3"] = {"ansible_ssh_args": "-o User=x -o ForwardAgent=yes -o ControlMaster=no"}
    # In this group alone: `gpunodes storage up` runs a playbook on it.
    storage = {"nas": {"ansible_ssh_extra_args": "-A"}}
    for number, words in enumerate(FORWARDING):
        hosts[f"forwards-{number}"] = {"ansible_ssh_args": words, "ansible_ssh_extra_args": words}
    path = tmp_path / "hosts.yml"
    common = {"ansible_ssh_common_args": arguments, "ansible_host": "10.0.0.1"}
    groups = {"workers": {"hosts": hosts, "vars": common}, "storage": {"hosts": storage, "vars": common}}
    path.write_text(yaml.safe_dump(groups))
    # These go before all that another inventory says of a machine.
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/gpu-2.yml").write_text("ansible_ssh_args: -A\n")
    found = resolved_by_ansible(path, tmp_path)
    assert {name for name, message in found.items() if message["stricthostkeychecking"] == "accept-new"} == {"gpu-2"}
    assert str(settings.known_hosts()) in found["gpu-2"]["userknownhostsfile"]
    assert str(settings.known_hosts()) not in found["gpu-1"]["userknownhostsfile"]
    assert {name: forwards(message) for name, message in found.items() if forwards(message)} == {}
    assert (found["gpu-3"]["user"], found["gpu-3"]["controlmaster"]) == ("x", "false")
    assert found["gpu-1"]["controlmaster"] == "auto"


def test_plain_ansible_forwards_nothing(site: Site) -> None:
    """The ansible.cfg of the repository allowed it."""
    site.config.write_text("ForwardAgent yes\nForwardX11 yes\nRemoteForward 9 localhost:1\nPermitLocalCommand yes\n")
    config = configparser.ConfigParser(interpolation=None)
    config.read(Path(__file__).parents[2] / "ansible.cfg")
    words = shlex.split(config["ssh_connection"]["ssh_args"])
    found = resolved_by_ssh(["ssh", *words, "-F", str(site.config), "gpu-1"])
    assert (found["stricthostkeychecking"], forwards(found)) == ("accept-new", set())


@pytest.mark.usefixtures("site")
def test_host_key_options_of_the_inventory_are_used_in_any_form(tmp_path: Path) -> None:
    """The files of the inventory were searched for the names of options."""
    (tmp_path / "group_vars").mkdir()
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: {ansible_host: 10.0.0.1}}}\n")
    (tmp_path / "group_vars/workers.yml").write_text(
        """{check: HostKeyChecking, ansible_ssh_common_args: "-o Strict{{ check }}=yes"}\n"""
    )
    variables = Inventory(path).connection("gpu-1")
    assert variables["ansible_ssh_common_args"] == "-o StrictHostKeyChecking=yes"
    own = runner._own_rules(Inventory(path))
    assert "StrictHostKeyChecking=yes" in own["gpu-1"]["ansible_ssh_args"]


@pytest.mark.parametrize("name", ["ANSIBLE_SSH_ARGS", "ANSIBLE_SSH_COMMON_ARGS", "ANSIBLE_SSH_EXTRA_ARGS"])
def test_options_of_the_environment_are_used(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ansible used them, after the options of gpunodes; the connections of gpunodes did not."""
    monkeypatch.setenv(name, f"-A -F {site.config}")
    site.config.write_text("StrictHostKeyChecking yes\n")
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: {ansible_host: 10.0.0.1}}}\n")
    variables = Inventory(path).connection("gpu-1")
    assert target("gpu-1", variables, ssh_config()).rules.strict
    ours, ansibles = resolved_by_ssh(shell.command("10.0.0.1", variables)), resolved_by_ansible(path, tmp_path)["gpu-1"]
    assert [(found["stricthostkeychecking"], forwards(found)) for found in (ours, ansibles)] == 2 * [("true", set())]


@needs_sshd
def test_jump_hosts_have_the_same_rules(site: Site, ports: dict[str, tuple[int, sshd.Servers]]) -> None:
    """From the ssh_config in the machine's arguments, as ssh passes it on."""
    (port, servers), (hop, hops) = ports["none"], ports["expired"]
    site.config.write_text(
        f"StrictHostKeyChecking yes\nUserKnownHostsFile {site.known_hosts}\nIdentityFile {hops.login}\nUser root\n"
    )
    variables = site.variables(port, servers)
    variables["ansible_ssh_common_args"] += f" -J 127.0.0.1:{hop}"
    machine = f"[127.0.0.1]:{port} {public(servers.host_key)}\n"
    site.known_hosts.write_text(machine)
    assert site.refuses(variables)
    site.known_hosts.write_text(f"{machine}[127.0.0.1]:{hop} {public(hops.host_key)}\n")
    assert site.probed(variables).reach is Reach.ANSWERED
    assert site.connected(variables)


@pytest.mark.usefixtures("site")
def test_machines_without_rules_have_no_options_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: {ansible_host: 10.0.0.1}}}\n")
    assert runner.inventories(Inventory(path), tmp_path) == [str(path)]


@pytest.mark.parametrize(
    "text",
    [
        "Include\tmore\n",
        "Include=more\n",
        'Include "more"\n',
        "Include more # the site's own\n",
        "Include ${HOME}/.ssh/more\n",
        "Include deep/*\n",
        "Host other\n  include none more\n",
        "KnownHostsCommand /bin/true\n",
        "GlobalKnownHostsFile /etc/known\n",
        "RevokedHostKeys /etc/revoked\n",
    ],
)
def test_host_key_options_are_found(site: Site, text: str) -> None:
    """Nested includes are relative to the user's file; in doubt ssh is started."""
    assert not openssh.has_own_rules()
    (site.config.parent / "deep").mkdir()
    (site.config.parent / "deep/one").write_text("Include more\n")
    (site.config.parent / "more").write_text("  StrictHostKeyChecking yes\n")
    site.config.write_text(text)
    assert openssh.has_own_rules()
    openssh.options("10.0.0.1")


def test_other_options_do_not_start_ssh(site: Site) -> None:
    (site.config.parent / "more").write_text("Host gpu-*\n  Port 2222\n")
    site.config.write_text("# Include more # the site's own StrictHostKeyChecking yes\nInclude more\n")
    assert not openssh.has_own_rules()
    assert not openssh.has_own_rules(["-o", "ProxyJump=bastion", "-p", "22"])
    assert openssh.has_own_rules(["-4F", "/dev/null"])


@pytest.mark.parametrize(
    ("words", "text", "holds"),
    [
        ("-o ProxyCommand=a#b -oStrictHostKeyChecking=ask", "", "yes"),
        ("-v -q", 'strictHostKeyChecking="ask" # none\n', "yes"),
        ("", "# StrictHostKeyChecking ask\nHost gpu-9\n", "accept-new"),
    ],
)
def test_an_explicit_ask_differs_from_the_default(site: Site, words: str, text: str, holds: str) -> None:
    """ssh -G prints ask for both."""
    site.config.write_text(text)
    found = openssh.options("10.0.0.1", ["-4F", str(site.config), *words.split()])
    assert f"StrictHostKeyChecking={holds}" in found


def test_an_ssh_config_that_ssh_refuses(site: Site) -> None:
    site.config.write_text("StrictHostKeyChecking perhaps\n")
    words = ["-F", str(site.config)]
    assert "StrictHostKeyChecking=yes" in openssh.options("10.0.0.1", words)
    with pytest.raises(WrongInput, match="unsupported option"):
        ssh_config()("10.0.0.1", words)


def test_the_files_that_ssh_names(site: Site, tmp_path: Path) -> None:
    """ssh takes the home directory from passwd, not from $HOME."""
    site.config.write_text(
        f'UserKnownHostsFile "{tmp_path}/a b" %d/x ${{HOME}}/%h-%p-%r ~/z\nGlobalKnownHostsFile none\n'
        "RevokedHostKeys ~/revoked/%k\nIdentityFile %d/key\nHostKeyAlias gpu\nUser ops\nPort 23\n"
    )
    message = openssh.resolved("10.0.0.1", ["-F", str(site.config)])
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert openssh.rules(message) == openssh.Rules(
        files=(f"{tmp_path}/a b", f"{home}/x", f"{tmp_path}/10.0.0.1-23-ops", f"{home}/z"),
        revoked=(f"{home}/revoked/gpu",),
    )
    assert message["identityfile"] == [f"{home}/key"]


def test_without_host_key_options_ssh_is_not_started(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each of a thousand machines is slow."""
    monkeypatch.setattr(openssh, "GLOBAL_KNOWN_HOSTS", ())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ssh was asked"))
    assert "StrictHostKeyChecking=accept-new" in openssh.options("gpu-1", ["-p", "22"])
    assert site.learned() == ""
