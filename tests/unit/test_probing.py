"""The scan, against real SSH servers on loopback addresses, some of them faulty."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import hmac
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from gpunodes import settings
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import scans
from gpunodes.engine.remote import answers, probing, programs
from gpunodes.engine.remote.commands import Become
from gpunodes.engine.remote.hostkeys import HostKeys, Trust
from gpunodes.engine.remote.probing import ProbeSettings
from gpunodes.engine.remote.reach import LostError, ProbeResult, Reach
from gpunodes.engine.remote.targets import Target, ssh_config, target
from gpunodes.errors import WrongInput
from gpunodes.health import shape
from gpunodes.health.model import Action, SiteRules, State, Verdict
from gpunodes.inventory import Inventory

from tests import sshd

pytestmark = pytest.mark.long

needs_sshd = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)

NOTHING: Mapping[str, Any] = {}


def send(script: str) -> str:
    """A command that prints the value of a Python expression in place of the probe's output."""
    code = f"import sys,time,zlib,json; out=sys.stdout.buffer; {script}"
    return f'{sys.executable} -c "{code}"'


def framed(document: str) -> str:
    return send(f"data=zlib.compress({document}); out.write(b'\\n{MARK}\\n%d\\n' % len(data)+data)")


BAD = {
    "shell hangs": "sleep 1000",
    "chatters": "yes",
    "says no": "echo '\x1b[31mpython3: not found' >&2; exit 127",
    "probe hangs": f"echo; echo {MARK}; sleep 1000",
    "no length": f"echo; echo {MARK}; echo nothing",
    "endless": f"echo; echo {MARK}; echo 99999999999; yes",
    "breaks off": f"echo; echo {MARK}; echo 5000; echo short",
    "gzip bomb": framed("b'0'*(64<<20)"),
    "value bomb": framed("b'['+b'[],'*2000000+b'[]]'"),
    "deep": framed("b'['*100000+b']'*100000"),
    "no json": framed("b'no'"),
    "list": framed("b'[]'"),
    "other": framed("b'{}'"),
}


@pytest.fixture(scope="module")
def ports_of() -> dict[str, int]:
    names = ["good", "jump", *BAD]
    return dict(zip(names, sshd.free_ports(len(names)), strict=True))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, ports_of: dict[str, int]) -> Iterator[sshd.Servers]:
    listening = {("127.0.0.1", port): BAD.get(name, "") for name, port in ports_of.items()}
    with sshd.serving(tmp_path_factory.mktemp("sshd"), [listening]) as running:
        yield running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    return tmp_path


@pytest.fixture
def machine(servers: sshd.Servers, ports_of: dict[str, int]) -> Any:
    """A target by the name of its behaviour."""

    def make(name: str, **others: Any) -> Target:
        message = {"port": ports_of.get(name, 0), "user": "root", "key_files": (str(servers.login),), **others}
        return Target(name, "127.0.0.1", **message)

    return make


def probe_targets(*targets: Target, deadline_s: float = 90, **options: Any) -> dict[str, ProbeResult]:
    chosen = ProbeSettings(**{"probe_s": 30, "connect_s": 20, "machine_s": 60, **options})
    return {answer.name: answer for answer in probing.probe(targets, chosen, deadline_s=deadline_s)}


def probe_command(folder: Path) -> str:
    """A shell command that runs the probe of this tree, whatever a scan sends."""
    command = programs.pack("probe.document", {}).command({"ansible_python_interpreter": sys.executable}, Become.NEVER)
    (folder / "probe").write_bytes(command.stdin)
    return f"{command.line} < {folder}/probe"


# --- a healthy machine -----------------------------------------------------------------------------------------------


@needs_sshd
def test_a_machine_is_probed_and_its_key_is_learned_once(machine: Any) -> None:
    found = probe_targets(machine("good"))["good"]
    assert (found.reach, found.message) == (Reach.ANSWERED, "")
    assert shape.violation(found.facts) == ""
    learned = settings.known_hosts().read_text()
    assert learned.count("\n") == 1
    assert probe_targets(machine("good"))["good"].reach is Reach.ANSWERED
    assert settings.known_hosts().read_text() == learned


@needs_sshd
def test_results_are_reported_when_available_and_returned_in_the_order_of_the_targets(machine: Any) -> None:
    reported: list[str] = []
    targets = [machine("shell hangs"), machine("good")]
    chosen = ProbeSettings(probe_s=15, machine_s=4)
    answers = probing.probe(targets, chosen, deadline_s=20, on_result=lambda answer: reported.append(answer.name))
    assert reported == ["good", "shell hangs"]
    assert [answer.name for answer in answers] == ["shell hangs", "good"]


@needs_sshd
def test_a_login_shell_may_print_a_banner(tmp_path: Path) -> None:
    port = sshd.free_ports(1)[0]
    script = tmp_path / "noisy.sh"
    script.write_text(f"echo Welcome to gpu-1\n{probe_command(tmp_path)}\n")
    folder = tmp_path / "other"
    folder.mkdir()
    with sshd.serving(folder, [{("127.0.0.1", port): f"sh {script}"}]) as other:
        found = probe_targets(Target("noisy", "127.0.0.1", port, "root", (str(other.login),)))["noisy"]
    assert (found.reach, found.message) == (Reach.ANSWERED, "")


# --- machines without facts ------------------------------------------------------------------------------------------


@needs_sshd
@pytest.mark.parametrize(
    ("name", "reach", "message"),
    [
        ("shell hangs", Reach.SHELL_HANGS, "no shell started in time"),
        ("chatters", Reach.PROBE_FAILED, "printed more than 65536 bytes"),
        ("says no", Reach.PROBE_FAILED, "python3: not found"),
        ("probe hangs", Reach.TIMEOUT, "did not end in time"),
        ("no length", Reach.PROBE_FAILED, "has no length"),
        ("endless", Reach.PROBE_FAILED, "the limit is 2097152"),
        ("breaks off", Reach.PROBE_FAILED, "output is incomplete"),
        ("gzip bomb", Reach.PROBE_FAILED, "unpacks to more than"),
        ("value bomb", Reach.PROBE_FAILED, "more than 1000000 values"),
        ("deep", Reach.PROBE_FAILED, "cannot be parsed"),
        ("no json", Reach.PROBE_FAILED, "cannot be parsed"),
        ("list", Reach.PROBE_FAILED, "not a JSON object"),
    ],
)
def test_the_reason_for_missing_facts_is_reported(machine: Any, name: str, reach: Reach, message: str) -> None:
    # Short for commands that hang; long for the others, which may be slow on a busy machine.
    for machine_s in (3, 60):
        found = probe_targets(machine(name), machine_s=machine_s, deadline_s=90)[name]
        if found.reach is reach:
            break
    assert (found.reach, found.facts) == (reach, None)
    assert message in found.message
    assert found.message.isprintable()


@needs_sshd
def test_login_refused(machine: Any, tmp_path: Path) -> None:
    wrong = sshd.new_key(tmp_path / "wrong")
    found = probe_targets(machine("good", key_files=(str(wrong),)))["good"]
    assert (found.reach, found.message) == (Reach.LOGIN_REFUSED, "sshd refused the login of root with 1 key")
    found = probe_targets(machine("good", key_files=(str(tmp_path / "none"),)))["good"]
    assert (found.reach, found.message) == (Reach.LOGIN_REFUSED, "sshd refused the login of root with 0 keys")


@needs_sshd
def test_a_changed_host_key_is_refused_and_reported(machine: Any, tmp_path: Path) -> None:
    other = sshd.new_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
    name = machine("good").host_key_name
    settings.known_hosts().write_text(f"{name} {' '.join(other)}\n")
    found = probe_targets(machine("good"))["good"]
    assert found.reach is Reach.KEY_CHANGED
    assert "SHA256:" in found.message
    assert f"ssh-keygen -R '{name}'" in found.message
    assert settings.known_hosts().read_text().count("\n") == 1


def test_a_hanging_name_server_delays_only_the_names_it_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a slow name lookup."""
    real = socket.getaddrinfo

    def slow(host: str, *words: Any, **more: Any) -> Any:
        if host.endswith(".example") and not more.get("flags"):
            time.sleep(3)
        return real(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    reported: dict[str, float] = {}
    began = time.monotonic()
    names = [Target(f"gpu-{n}", f"gpu-{n}.example") for n in range(40)]
    answers = probing.probe(
        [*names, Target("closed", "127.0.0.1", sshd.free_ports(1)[0])],
        ProbeSettings(connect_s=1),
        deadline_s=10,
        on_result=lambda answer: reported.update({answer.name: time.monotonic() - began}),
    )
    assert reported["closed"] < 1
    assert max(reported.values()) < 2.5
    assert {answer.reach for answer in answers} == {Reach.NO_ROUTE, Reach.REFUSED}


def test_the_time_that_one_result_takes_does_not_count_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict may take seconds. With a stand-in for a name lookup that takes less than its limit."""
    real = socket.getaddrinfo

    def slow(host: str, *words: Any, **more: Any) -> Any:
        if host == "localhost" and not more.get("flags"):
            time.sleep(0.5)
        return real(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    first, second = (sshd.free_ports(1)[0] for _ in range(2))
    answers = probing.probe(
        [Target("first", "127.0.0.1", first), Target("second", "localhost", second)],
        ProbeSettings(connect_s=1.5),
        deadline_s=2,
        on_result=lambda answer: time.sleep(3) if answer.name == "first" else None,
    )
    assert [answer.reach for answer in answers] == [Reach.REFUSED, Reach.REFUSED]


@contextlib.contextmanager
def silent_listener(backlog: int = 64) -> Iterator[int]:
    """A listening port that sends nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield listener.getsockname()[1]


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """A port that does not respond: its queue is full, so the kernel drops new connections."""
    with silent_listener(0) as port, contextlib.ExitStack() as stack:
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.1)
        yield port


def test_refused_and_no_route() -> None:
    free = sshd.free_ports(1)[0]
    with silent_listener() as silent, full_listener() as lost:
        answers = probe_targets(
            Target("refused", "127.0.0.1", free),
            Target("nameless", "no-such-host.invalid"),
            Target("silent", "127.0.0.1", silent),
            Target("lost", "127.0.0.1", lost),
            connect_s=1.0,
        )
    assert {name: answer.reach for name, answer in answers.items()} == {
        "refused": Reach.REFUSED,
        "nameless": Reach.NO_ROUTE,
        "silent": Reach.SHELL_HANGS,
        "lost": Reach.NO_ROUTE,
    }
    assert answers["silent"].message == "connected, but sshd sends no SSH banner"


def test_a_server_that_closes_the_connection() -> None:
    code = (
        "import socket\ns=socket.socket(); s.bind(('127.0.0.1',0)); s.listen(9)\n"
        "print(s.getsockname()[1],flush=True)\nwhile True: s.accept()[0].close()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = probe_targets(Target("closing", "127.0.0.1", int(process.stdout.readline())))["closing"]
        process.kill()
    assert (found.reach, found.message) == (Reach.REFUSED, "sshd closed the connection before the login")


@needs_sshd
def test_unresponsive_machines_do_not_delay_others(machine: Any) -> None:
    reported: dict[str, float] = {}
    deadline_s = 12
    with silent_listener() as silent, full_listener() as lost:
        dead = [Target(f"dead-{n}", "127.0.0.1", silent if n % 2 else lost) for n in range(20)]
        targets = [*dead, machine("good")]
        began = time.monotonic()
        answers = probing.probe(
            targets,
            ProbeSettings(probe_s=15, connect_s=60),
            deadline_s=deadline_s,
            parallel=2,
            on_result=lambda answer: reported.update({answer.name: time.monotonic() - began}),
        )
        took = time.monotonic() - began
    assert took < deadline_s + 1
    assert reported["good"] < deadline_s
    assert answers[-1].reach is Reach.ANSWERED
    assert {answer.reach for answer in answers[:-1]} == {Reach.SHELL_HANGS, Reach.NO_ROUTE}


# --- connections -----------------------------------------------------------------------------------------------------


@needs_sshd
def test_through_a_jump_host(machine: Any, ports_of: dict[str, int]) -> None:
    jump = machine("jump")
    free = sshd.free_ports(1)[0]
    answers = probe_targets(
        machine("good", jump=(jump,)),
        machine("closed", port=free, jump=(jump,)),
        machine("behind", port=ports_of["good"], jump=(machine("gone", port=free),)),
        machine("hangs", port=ports_of["shell hangs"], jump=(jump,)),
        machine_s=12,
    )
    assert answers["good"].reach is Reach.ANSWERED
    assert (answers["closed"].reach, answers["closed"].message) == (
        Reach.NO_ROUTE,
        "from the jump host: Connect failed",
    )
    assert answers["behind"].reach is Reach.REFUSED
    assert answers["behind"].message == "gone: Connection refused"
    assert answers["hangs"].reach is Reach.SHELL_HANGS


@needs_sshd
def test_through_a_proxy_command_of_ssh_config(servers: sshd.Servers, ports_of: dict[str, int], home: Path) -> None:
    (home / ".ssh/more").write_text(f"Host gpu-*\n  HostName 127.0.0.1\n  Port {ports_of['good']}\n  User root\n")
    (home / ".ssh/config").write_text(
        f"Include more\nHost gpu-1\n  IdentityFile {servers.login}\n"
        f"  ProxyCommand ssh -i {servers.login} -o BatchMode=yes -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile=/dev/null -p {ports_of['jump']} -W %h:%p root@127.0.0.1\n"
        f"Host gpu-2\n  IdentityFile {servers.login}\n  ProxyJump root@127.0.0.1:{ports_of['jump']}\n"
    )
    lookup = ssh_config()
    found = [target(name, NOTHING, lookup) for name in ("gpu-1", "gpu-2")]
    assert found[0].proxy_command.endswith(f"-W 127.0.0.1:{ports_of['good']} root@127.0.0.1")
    assert [hop.port for hop in found[1].jump] == [ports_of["jump"]]
    answers = probe_targets(*found)
    assert {answer.reach for answer in answers.values()} == {Reach.ANSWERED}, answers


@needs_sshd
@pytest.mark.skipif(not shutil.which("ssh-agent"), reason="needs ssh-agent")
def test_with_the_agents_key(machine: Any, servers: sshd.Servers, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["ssh-agent", "-D", "-a", home / "agent"], stdout=subprocess.DEVNULL) as agent:
        try:
            monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "agent"))
            while not (home / "agent").exists():
                time.sleep(0.05)
            subprocess.run(["ssh-add", "-q", servers.login], check=True)
            found = probe_targets(
                machine("good", key_files=()),
                machine("alone", port=machine("good").port, key_files=(), identities_only=True),
            )
        finally:
            agent.terminate()
    assert found["good"].reach is Reach.ANSWERED
    assert found["alone"].reach is Reach.LOGIN_REFUSED


# --- targets ---------------------------------------------------------------------------------------------------------


def no_config(_host: str, _words: Sequence[str]) -> Mapping[str, Any]:
    return {}


def test_the_inventory_overrides_ssh_config() -> None:
    config = {"hostname": "10.0.0.9", "port": "99", "user": "config", "identityfile": ["~/.ssh/config-key"]}
    variables = {
        "ansible_host": "10.0.0.1",
        "ansible_port": 2222,
        "ansible_user": "admin",
        "ansible_ssh_private_key_file": "~/key",
        "ansible_python_interpreter": "auto_silent",
    }
    found = target("gpu-1", variables, lambda host, _: {**config, "hostname": host})
    assert (found.address, found.port, found.user, found.python) == ("10.0.0.1", 2222, "admin", "/usr/bin/python3")
    assert found.key_files == (str(Path("~/key").expanduser()),)
    assert found.host_key_name == "[10.0.0.1]:2222"
    found = target("gpu-1", NOTHING, lambda *_: config)
    assert (found.address, found.port, found.user) == ("10.0.0.9", 99, "config")


@pytest.mark.parametrize(
    ("arguments", "hops"),
    [
        ("-J ops@bastion:2200", [("bastion", 2200, "ops")]),
        ("-Jbastion", [("bastion", 22, None)]),
        ("-o ProxyJump=a,ops@[fe80::1]:23", [("a", 22, None), ("fe80::1", 23, "ops")]),
        ("-o 'ProxyJump bastion' -o StrictHostKeyChecking=no", [("bastion", 22, None)]),
        ("-o ProxyJump=none", []),
    ],
)
def test_jump_hosts_of_the_inventory(arguments: str, hops: list[tuple[str, int, str | None]]) -> None:
    found = target("gpu-1", {"ansible_ssh_common_args": arguments}, no_config)
    assert [(hop.address, hop.port) for hop in found.jump] == [(host, port) for host, port, _ in hops]
    assert all(hop.user == user for hop, (_, _, user) in zip(found.jump, hops, strict=True) if user)


def test_a_proxy_command_of_the_inventory() -> None:
    arguments = """-o ProxyCommand="ssh -W %h:%p -q bastion" """
    found = target("gpu-1", {"ansible_ssh_common_args": arguments, "ansible_host": "10.0.0.1"}, no_config)
    assert found.proxy_command == "ssh -W 10.0.0.1:22 -q bastion"


@pytest.mark.parametrize(
    "variables",
    [{"ansible_host": "{{ address }}"}, {"ansible_port": "ssh"}, {"ansible_ssh_common_args": "-o 'open"}],
)
def test_invalid_connection_variables_are_wrong_input(variables: Mapping[str, Any]) -> None:
    with pytest.raises(WrongInput, match="gpu-1"):
        target("gpu-1", variables, no_config)


def test_an_invalid_ssh_config_is_wrong_input(home: Path) -> None:
    (home / ".ssh/config").write_text("Host gpu-1\n  nonsense\n")
    with pytest.raises(WrongInput, match="ssh_config"):
        ssh_config()


# --- host keys -------------------------------------------------------------------------------------------------------


def hashed(name: str) -> str:
    salt = b"0123456789abcdef0123"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))


def test_host_keys_in_every_format(tmp_path: Path) -> None:
    ours, users = tmp_path / "ours/known_hosts", tmp_path / "known_hosts"
    key = base64.b64encode(b"key").decode()
    users.write_text(
        f"# comment\n\nplain,10.0.0.1 ssh-ed25519 {key} comment\n{hashed('[hidden]:2222')} ssh-ed25519 {key}\n"
        f"gpu-*,!gpu-9 ssh-rsa {key}\n@cert-authority ca-* ssh-rsa {key}\n|1|broken ssh-rsa x\n"
        f"@revoked * ssh-ed25519 {base64.b64encode(b'bad').decode()}\n"
    )
    keys = HostKeys([ours, users])
    assert keys.judge("plain", "ssh-ed25519", b"key") is Trust.KNOWN
    assert keys.judge("PLAIN", "ssh-ed25519", b"key") is Trust.KNOWN
    assert keys.judge("10.0.0.1", "ssh-ed25519", b"other") is Trust.CHANGED
    assert keys.judge("[hidden]:2222", "ssh-ed25519", b"key") is Trust.KNOWN
    assert keys.judge("gpu-1", "ssh-rsa", b"key") is Trust.KNOWN
    assert keys.types("gpu-1") == ("ssh-rsa",)
    # Whoever stands in between could choose the kind of key.
    assert keys.judge("gpu-1", "ssh-ed25519", b"key") is Trust.CHANGED
    assert keys.judge("new", "ssh-ed25519", b"bad") is Trust.REVOKED
    # Nor is there a first contact where a certificate authority vouches.
    assert keys.judge("ca-1", "ssh-ed25519", b"key") is Trust.UNKNOWN
    assert keys.judge("gpu-8", "ssh-ed25519", b"key", strict=True) is Trust.CHANGED
    assert keys.judge("new", "ssh-ed25519", b"key", strict=True) is Trust.UNKNOWN
    assert not ours.exists()
    assert keys.judge("gpu-9", "ssh-ed25519", b"key") is Trust.NEW
    assert keys.judge("gpu-9", "ssh-ed25519", b"key") is Trust.KNOWN
    assert ours.read_text() == f"gpu-9 ssh-ed25519 {key}\n"
    assert HostKeys([ours, users]).judge("gpu-9", "ssh-ed25519", b"other") is Trust.CHANGED


# --- what comes back is not trusted ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    program = programs.pack("probe.document", {})
    words = program.argv({"ansible_python_interpreter": sys.executable})
    done = subprocess.run(words, input=program.packed, capture_output=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(zlib.decompress(done.stdout.split(b"\n", 3)[3]))
    found["tasks"] = [
        {"pid": 1, "comm": "x", "state": "D", "kthread": False, "wchan": "", "stack": ["f+0x1"], "age_s": 1.0}
    ]
    found["pci"] = [
        {
            "address": "0000:3b:00.0",
            "vendor": "10de",
            "device": "2330",
            "class": "030200",
            "driver": None,
            "responds": True,
            "link": {"speed": "16 GT/s", "width": 16, "max_speed": "16 GT/s", "max_width": 16},
            "aer": {"correctable": 0, "nonfatal": 0, "fatal": 0},
        }
    ]
    found["services"] = {"nvidia-persistenced": "active"}
    found["log"]["repeats"] = [{"line": "x", "count": 60, "first": 1.0, "last": 2.0}]
    found["log"]["text"] = found["log"]["text"][-2000:]
    return found


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a document."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))


def replaced(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def verdict(document: Any) -> Verdict:
    return scans.verdict_on(ProbeResult("gpu-1", Reach.ANSWERED, facts=document), SiteRules())


def test_a_wrong_type_anywhere_makes_the_document_invalid(facts: dict[str, Any]) -> None:
    assert verdict(facts).state is not State.UNREACHABLE
    for path in leaves(facts):
        for wrong in (object(), [[1]], {"a": {}}, float("nan"), 1 << 80, -0.5, True, "\x1b[2J", None):
            found = verdict(replaced(facts, path, wrong))
            if not shape.violation(replaced(facts, path, wrong)) or (not path and wrong is None):
                continue  # that value may stand there; or it is no answer at all
            assert found.state is State.UNREACHABLE, (path, wrong)
            assert found.findings[0].rule == "unreachable-probe-failed"


def test_a_missing_field_makes_the_document_invalid(facts: dict[str, Any]) -> None:
    # Who it is may be unknown: the matcher takes odd values for that.
    free = {"services", "hostname", "machine_id", "product_uuid", "product_serial", "macs"}
    for path in leaves(facts):
        # Facts that were recorded before have no stack of nvidia-smi.
        if path and isinstance(path[-1], str) and path[0] not in free and path != ("smi", "stack"):
            changed = replaced(facts, path, None)
            inner: Any = changed
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]]
            assert verdict(changed).state is State.UNREACHABLE, path


def test_a_newer_probe_may_add_fields(facts: dict[str, Any]) -> None:
    assert shape.violation({**facts, "more": 1}) == ""
    assert "schema" in shape.violation({**facts, "schema": "gpunodes.probe/2"})


@pytest.mark.parametrize("document", [b"{}", b"", b"x" * 100, b'{"a": 1e999}'])
def test_unpacking_small_documents(document: bytes) -> None:
    with contextlib.suppress(LostError):
        answers.unpacked(zlib.compress(document))
    with pytest.raises(LostError):
        answers.unpacked(document)


def test_the_deadline_grows_with_the_number_of_machines() -> None:
    assert scans.deadline_for(1) < 61
    assert scans.deadline_for(1000) > 300


@needs_sshd
def test_watch_scans_again_until_it_is_stopped(tmp_path: Path) -> None:
    """The machine responds in the first round and not in the second."""
    script = tmp_path / "once.sh"
    script.write_text(f"mkdir {tmp_path}/asked 2>/dev/null || exit 1\n{probe_command(tmp_path)}\n")
    folder = tmp_path / "other"
    folder.mkdir()
    port = sshd.free_ports(1)[0]
    with sshd.serving(folder, [{("127.0.0.1", port): f"sh {script}"}]) as other:
        message = {"ansible_port": port, "ansible_user": "root", "ansible_ssh_private_key_file": str(other.login)}
        inventory = write_inventory(tmp_path, **message)
        words = ["health", "--watch", "2", "--deadline", "60", "-i", str(inventory)]
        with subprocess.Popen(
            # Where these tests run in the background, an interruption is ignored by all that they start.
            ["env", "--default-signal=INT", sys.executable, "-c", "from gpunodes.cli import main; main()", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as running:
            assert running.stdout is not None
            rounds: list[list[str]] = [[]]
            for line in running.stdout:
                rounds[-1].append(line)
                if re.fullmatch(r"\d of 1 healthy\.\n", line):
                    if len(rounds) == 2:
                        break
                    rounds.append([])
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) == 130
    assert "unreachable" not in "".join(rounds[0])
    assert rounds[1][0] == "gpu-1: unreachable\n"


# --- the settings and the role ---------------------------------------------------------------------------------------


def write_inventory(folder: Path, **variables: object) -> Path:
    path = folder / "hosts.yml"
    hosts = {"gpu-1": {"ansible_host": "127.0.0.1", **variables}}
    path.write_text(yaml.safe_dump({"workers": {"hosts": hosts}}))
    return path


def test_site_settings_for_codes_and_expected_gpus(tmp_path: Path) -> None:
    inventory = Inventory(write_inventory(tmp_path, gpunodes_health_xids={13: "repair"}, gpunodes_health_gpus=8))
    (asked,) = scans.scan_targets(inventory, inventory.select(()))
    assert asked.site == SiteRules(xids={13: Action.REPAIR})
    assert asked.gpus == 8


@pytest.mark.parametrize(
    "variables",
    [
        {"gpunodes_health_xids": {"79": "explode"}},
        {"gpunodes_health_xids": [79]},
        {"gpunodes_health_sxids": {"x": "none"}},
        {"gpunodes_health_gpus": "many"},
    ],
)
def test_invalid_site_settings(tmp_path: Path, variables: dict[str, Any]) -> None:
    inventory = Inventory(write_inventory(tmp_path, **variables))
    with pytest.raises(WrongInput, match=r"gpunodes_health_.* gpu-1|gpu-1: gpunodes_health_"):
        scans.scan_targets(inventory, inventory.select(()))


def test_a_machine_with_fewer_gpus_than_its_settings_is_unhealthy(facts: dict[str, Any]) -> None:
    answer = ProbeResult("gpu-1", Reach.ANSWERED, facts=facts)
    found = scans.verdict_on(answer, SiteRules(), 8)
    assert (found.gpus_expected, found.state is State.HEALTHY) == (8, False)


def test_the_filter_returns_the_same_verdict(facts: dict[str, Any]) -> None:
    from gpunodes.ansible.filter.general import health

    found = health(facts, "gpu-1")
    assert found["state"] == verdict(facts).state.value
    assert found["text"].startswith(f"gpu-1: {found['state']}")
    assert health({**facts, "pci": "none"}, "gpu-1")["findings"][0]["rule"] == "unreachable-probe-failed"
    with pytest.raises(AnsibleFilterError, match="gpunodes_health_xids"):
        health(facts, "gpu-1", {"79": "explode"})


@needs_sshd
def test_the_playbook_returns_the_same_verdict(machine: Any, tmp_path: Path) -> None:
    good = machine("good")
    inventory = write_inventory(
        tmp_path, ansible_port=good.port, ansible_user="root", ansible_ssh_private_key_file=good.key_files[0]
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(inventory), "--check", "playbooks/health.yml"),
            *("--ssh-common-args", f"-o UserKnownHostsFile={tmp_path}/known -o ControlMaster=no -o ControlPath=none"),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (message,) = re.findall(r'"msg": "(.*)"', done.stdout)
    told = scans.verdict_on(probe_targets(good)["good"], SiteRules())
    assert message.startswith(f"gpu-1: {told.state}")
    assert "changed=0" in done.stdout
