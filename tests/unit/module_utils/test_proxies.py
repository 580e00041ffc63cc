"""HTTP proxies of a machine: what goes through them, on a proxy on loopback; the files that name them; secrets."""

from __future__ import annotations

import functools
import http.server
import json
import os
import pwd
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import docker_images, facts, kube_api, ledger, lock, packages, undo
from gpunodes.ansible.module_utils.host import images, keys, services, sources
from gpunodes.ansible.module_utils.host import proxies as host_proxies
from gpunodes.ansible.module_utils.host.converge import converge, diff
from gpunodes.ansible.module_utils.host.spec import Repository, spec_from
from gpunodes.ansible.module_utils.kubeadm import command
from gpunodes.ansible.module_utils.kubeconfig import Kubeconfig
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.ansible.module_utils.proxies import Proxies, is_excepted, opener, proxies_from, public, unreachable
from gpunodes.ansible.module_utils.report import shown

from tests import forward_proxy

SECRET = "s%40fe!word"
CREDENTIALS = f"builder:{SECRET}"
DECODED = "builder:s@fe!word"

# Which requests go through a proxy


@pytest.mark.parametrize(
    ("host", "entry", "excepted"),
    [
        ("example.com", "example.com", True),
        ("Mirror.Example.com.", "example.com", True),
        ("badexample.com", "example.com", False),
        ("example.com", ".example.com", False),
        ("mirror.example.com", ".example.com", True),
        ("kubernetes.default.svc", ".svc", True),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.30", "10.1.2.3", False),
        ("[fd00::7]", "fd00::/64", True),
        ("fd00::7", "10.0.0.0/8", False),
        ("host10.0.0.0", "10.0.0.0/8", False),
        ("localhost", "", True),
        ("127.9.9.9", "", True),
        ("::1", "", True),
        ("example.com", "", False),
        ("example.com", "com/evil", False),
    ],
)
def test_exceptions_are_those_of_programs_in_go(host: str, entry: str, excepted: bool) -> None:
    assert is_excepted(host, [entry] if entry else []) is excepted


@pytest.fixture
def site() -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """A web server on loopback, at mirror.test: its port and the headers of its requests."""
    seen: list[Mapping[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            moved = self.path == "/moved"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", f"http://localhost:{self.server.server_port}/here")  # type: ignore[attr-defined]  # an HTTPServer
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield str(server.server_port), seen
    server.shutdown()
    server.server_close()


def through(proxy: forward_proxy.ForwardProxy, credentials: str = "", *no_proxy: str) -> Proxies:
    url = proxy.address.replace("//", f"//{credentials}@") if credentials else proxy.address
    return Proxies(url, url, no_proxy)


def test_downloads_use_the_proxy_with_its_credentials(site: tuple[str, list[Mapping[str, str]]]) -> None:
    port, seen = site
    with forward_proxy.running(DECODED, mirror="127.0.0.1") as proxy:
        assert keys.fetch(f"http://mirror.test:{port}/key", through(proxy, CREDENTIALS)) == "ok"
        with pytest.raises(MachineProblem, match="cannot be fetched"):  # the server does not speak TLS
            keys.fetch(f"https://mirror.test:{port}/key", through(proxy, CREDENTIALS))
        assert [(record.method, record.target, record.status) for record in proxy.records] == [
            ("GET", f"http://mirror.test:{port}/key", 200),
            ("CONNECT", f"mirror.test:{port}", 200),
        ]
    assert all("Proxy-Authorization" not in headers for headers in seen)


def test_the_environment_does_not_replace_the_settings(
    site: tuple[str, list[Mapping[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of the machine's /etc/environment: another proxy, and no proxy at all."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "*")
    with forward_proxy.running(mirror="127.0.0.1") as proxy:
        assert keys.fetch(f"http://mirror.test:{site[0]}/key", through(proxy)) == "ok"
        assert len(proxy.records) == 1


def test_without_a_setting_the_environment_counts(
    site: tuple[str, list[Mapping[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with forward_proxy.running(mirror="127.0.0.1") as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        monkeypatch.delenv("no_proxy", raising=False)
        assert keys.fetch(f"http://mirror.test:{site[0]}/key") == "ok"
        assert len(proxy.records) == 1


def test_excepted_hosts_are_reached_directly(site: tuple[str, list[Mapping[str, str]]]) -> None:
    with forward_proxy.running() as proxy:
        assert keys.fetch(f"http://localhost:{site[0]}/key", through(proxy)) == "ok"
        assert keys.fetch(f"http://127.0.0.1:{site[0]}/key", through(proxy)) == "ok"
        assert proxy.records == []


def test_a_redirection_to_an_excepted_host_gets_no_credentials(site: tuple[str, list[Mapping[str, str]]]) -> None:
    port, seen = site
    with forward_proxy.running(DECODED, mirror="127.0.0.1") as proxy:
        with opener(through(proxy, CREDENTIALS)).open(f"http://mirror.test:{port}/moved", timeout=20) as response:
            assert response.read() == b"ok"
        assert proxy.targets == [f"http://mirror.test:{port}/moved"]
    assert all("Proxy-Authorization" not in {name.title() for name in headers} for headers in seen)


def test_the_api_server_is_never_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with forward_proxy.running() as proxy:
        for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.address)
        context = ssl.create_default_context()
        monkeypatch.setattr(ssl, "create_default_context", lambda **_: context)
        config = Kubeconfig("https://127.0.0.2:9", "", "", "")
        with pytest.raises(kube_api.ApiError):
            kube_api.Client(config, patience_s=0).get("/readyz")
        assert proxy.records == []


# What preflight reads


def source(port: str, scheme: str = "http") -> dict[str, Any]:
    return {"name": "registry", "kind": "registry", "url": f"{scheme}://mirror.test:{port}/v2/"}


@pytest.fixture
def machine_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_machine", dict)


@pytest.mark.usefixtures("machine_facts")
def test_sources_are_checked_through_the_proxy(site: tuple[str, list[Mapping[str, str]]]) -> None:
    with forward_proxy.running(DECODED, mirror="127.0.0.1") as proxy:
        found = facts.read([source(site[0])], through(proxy, CREDENTIALS))
        assert proxy.targets == [f"http://mirror.test:{site[0]}/v2/"]
    assert [each["ok"] for each in found["sources"]] == [True]
    assert found["proxies"] == []


@pytest.mark.usefixtures("machine_facts")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_refused_credentials_are_one_finding(site: tuple[str, list[Mapping[str, str]]], scheme: str) -> None:
    with forward_proxy.running(DECODED, mirror="127.0.0.1") as proxy:
        found = facts.read([source(site[0], scheme)] * 3, through(proxy, "builder:wrong"))
        assert found["proxies"] == [{"url": proxy.address, "error": "it responds 407 Proxy Authentication Required"}]
    assert found["sources"] == []
    assert "wrong" not in json.dumps(found)


@pytest.mark.usefixtures("machine_facts")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_of_the_environment_that_refuses_is_the_error_of_each_source(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpunodes has no setting to name."""
    with forward_proxy.running(DECODED) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", proxy.address)
        monkeypatch.delenv("no_proxy", raising=False)
        found = facts.read([source("1", scheme)])
    assert found["proxies"] == []
    assert "407 Proxy Authentication Required" in found["sources"][0]["error"]


@pytest.mark.usefixtures("machine_facts")
def test_a_proxy_that_is_down_is_one_finding(site: tuple[str, list[Mapping[str, str]]]) -> None:
    with forward_proxy.running() as proxy:
        down = through(proxy, CREDENTIALS)
    direct = {**source(site[0]), "url": f"http://127.0.0.1:{site[0]}/v2/"}
    found = facts.read([source("1"), source("1", "https"), direct], down)
    assert found["proxies"] == [{"url": proxy.address, "error": "Connection refused"}]
    assert [each["url"] for each in found["sources"]] == [direct["url"]]
    assert unreachable(down) == {proxy.address: "Connection refused"}


@pytest.mark.usefixtures("machine_facts")
def test_without_sources_no_proxy_is_contacted() -> None:
    assert facts.read([], Proxies("http://192.0.2.1:1"))["proxies"] == []


# The desired state


def test_missing_credentials_are_an_error_and_not_a_407() -> None:
    given = {"http": "http://{credentials}@proxy.test:3128", "https": "", "no_proxy": []}
    with pytest.raises(MachineProblem, match=r"proxy http://proxy\.test:3128 are missing"):
        spec_from({"proxies": given})
    found = spec_from({"proxies": given}, {"http": CREDENTIALS}).proxies
    assert found is not None
    assert found.http == f"http://{CREDENTIALS}@proxy.test:3128"
    assert public(found.http) == "http://proxy.test:3128"
    assert proxies_from({}, None) is None
    assert proxies_from({"http": "", "https": "", "no_proxy": ["a"]}, None) is None


# The files


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with apt and a running containerd; its root. No program is started."""
    root = tmp_path / "machine"
    (root / "apt").mkdir(parents=True)
    monkeypatch.setattr(ledger, "PATH", str(root / "ledger/ledger.json"))
    monkeypatch.setattr(lock, "PATH", str(root / "lock"))
    monkeypatch.setattr(undo, "TEMPORARY_FILES", ())
    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.getpwuid(os.getuid()))
    monkeypatch.setattr(packages, "detect", packages.Apt)
    monkeypatch.setattr(packages.Apt, "installed", lambda *_: {"containerd": packages.PackageState("2.1", held=True)})
    monkeypatch.setattr(packages.Apt, "finish_interrupted", lambda _: False)
    monkeypatch.setattr(sources, "paths", lambda *_: (str(root / "key"), str(root / "source.repo")))
    for function, place in (
        ("apt_file", "apt/proxy"),
        ("variables_file", "etc/{}.env"),
        ("drop_in_file", "unit/{}.d/p"),
    ):
        monkeypatch.setattr(host_proxies, function, functools.partial(_place, root, place))
    commands: list[list[str]] = []

    def run(argv: list[str], *_: Any, **__: Any) -> CommandResult:
        commands.append(argv)
        listing = "http://deb.intern.test/debian/\nhttp://deb.debian.test/debian/\nhttp://[bad\n"
        return CommandResult(argv, 0, listing if argv[1] == "indextargets" else "", "")

    monkeypatch.setattr(host_proxies, "run", run)
    monkeypatch.setattr(services, "run", run)
    monkeypatch.setattr(undo, "run", run)
    monkeypatch.setattr(services, "states", lambda names: {name: {"enabled": True, "active": True} for name in names})
    monkeypatch.setattr(ROOTS, "commands", commands, raising=False)
    return root


class ROOTS:
    """What the machine's programs were started with."""

    commands: list[list[str]]


def _place(root: Path, place: str, name: str) -> str:
    return str(root / place.format(name))


def wanted(**proxies: Any) -> dict[str, Any]:
    """The desired state of containerd's role."""
    return {
        "packages": [{"name": "containerd", "hold": True}],
        "services": [{"name": "containerd", "proxied": True}],
        "proxies": {"http": "", "https": "", "no_proxy": [], **proxies},
    }


NO_PROXY = ["localhost", "10.0.0.0/8", ".intern.test", "host.test", "fd00::1"]
PLAIN = {"http": "http://proxy.test:3128", "https": "http://proxy.test:3128", "no_proxy": NO_PROXY}
SECRETLY = {**PLAIN, "http": "http://{credentials}@proxy.test:3128", "https": "http://{credentials}@proxy.test:3128"}
KNOWN = {"http": CREDENTIALS, "https": CREDENTIALS}


def restarts() -> int:
    count = ROOTS.commands.count(["systemctl", "restart", "containerd"])
    ROOTS.commands.clear()
    return count


def test_settings_converge_change_and_disappear(machine: Path) -> None:
    none, plain, secretly = wanted(), wanted(**PLAIN), wanted(**SECRETLY)
    assert converge(spec_from(none)).actions == []
    assert restarts() == 0

    assert diff({"containerd": plain})[0] == ["containerd"]
    assert "restart containerd" in converge(spec_from(plain)).actions
    assert restarts() == 1
    assert converge(spec_from(plain)).actions == []
    assert diff({"containerd": plain})[0] == []
    assert restarts() == 0
    assert (machine / "etc/containerd.env").read_text() == (
        '# Managed by gpunodes.\nHTTP_PROXY="http://proxy.test:3128"\nHTTPS_PROXY="http://proxy.test:3128"\n'
        'NO_PROXY="localhost,10.0.0.0/8,.intern.test,host.test,fd00::1"\n'
    )
    assert (
        (machine / "unit/containerd.d/p")
        .read_text()
        .endswith(f"[Service]\nEnvironmentFile=-{machine}/etc/containerd.env\n")
    )
    assert (machine / "apt/proxy").read_text() == "// Managed by gpunodes.\n" + "".join(
        f'Acquire::{scheme}::Proxy "http://proxy.test:3128";\n'
        f'Acquire::{scheme}::Proxy::deb.intern.test "DIRECT";\n'
        f'Acquire::{scheme}::Proxy::host.test "DIRECT";\n'
        f'Acquire::{scheme}::Proxy::localhost "DIRECT";\n'
        for scheme in ("http", "https")
    )
    assert {path.stat().st_mode & 0o777 for path in (machine / "etc").iterdir()} == {0o644}

    converge(spec_from(secretly, KNOWN))
    assert restarts() == 1
    assert converge(spec_from(secretly, KNOWN)).actions == []
    changed = {name: value.replace("builder", "other") for name, value in KNOWN.items()}
    assert diff({"containerd": secretly}, changed)[0] == ["containerd"]
    converge(spec_from(secretly, changed))
    assert restarts() == 1

    assert diff({"containerd": none})[0] == ["containerd"]
    converge(spec_from(none))
    assert restarts() == 1
    left = [path.name for path in machine.rglob("*") if path.is_file() and path.name != "ledger.json"]
    assert left == []
    assert converge(spec_from(none)).actions == []


@pytest.mark.usefixtures("machine")
def test_an_interrupted_change_restarts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: Any) -> None:
        raise MachineProblem("power cut")

    with monkeypatch.context() as broken:
        broken.setattr(services, "start", cut)
        with pytest.raises(MachineProblem, match="power cut"):
            converge(spec_from(wanted(**PLAIN)))
    assert diff({"containerd": wanted(**PLAIN)})[0] == ["containerd"]
    assert converge(spec_from(wanted(**PLAIN))).actions == ["restart containerd"]


def test_check_mode_changes_nothing(machine: Path) -> None:
    before = sorted(machine.rglob("*"))
    actions = converge(spec_from(wanted(**PLAIN)), check=True).actions
    assert len([action for action in actions if action.startswith("write ")]) == 3
    assert sorted(machine.rglob("*")) == before


def test_credentials_are_in_private_files_only(machine: Path) -> None:
    changes = converge(spec_from(wanted(**SECRETLY), KNOWN))
    converge(spec_from(wanted(**SECRETLY), {name: f"{value}2" for name, value in KNOWN.items()}))
    secret = [path for path in machine.rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert sorted(path.name for path in secret) == ["containerd.env", "proxy"]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    assert SECRET not in json.dumps([changes.actions, shown(changes.differences)])
    assert SECRET not in json.dumps(ROOTS.commands)
    assert SECRET not in Path(ledger.PATH).read_text()


def test_a_reset_removes_all_and_restarts_a_runtime_that_was_there_before(machine: Path) -> None:
    converge(spec_from(wanted(**SECRETLY), KNOWN))
    restarts()
    actions = undo.Undoer().run()
    assert "restart containerd" in actions
    assert restarts() == 1
    assert [path.name for path in machine.rglob("*") if path.is_file()] == []
    assert not (machine / "unit").exists()


def test_a_reset_restarts_nothing_without_proxies(machine: Path) -> None:
    converge(spec_from({**wanted(), "files": [{"path": str(machine / "file"), "content": "x"}]}))
    assert "restart containerd" not in undo.Undoer().run()


def test_only_proxied_services_get_the_variables(machine: Path) -> None:
    spec = {**wanted(**PLAIN), "services": [{"name": "kubelet"}]}
    assert [action for action in converge(spec_from(spec)).actions if "write" in action] == [
        f"write {machine}/apt/proxy"
    ]


def test_each_section_of_the_ledger_has_its_own_file_of_apt() -> None:
    assert host_proxies.apt_file("") == "/etc/apt/apt.conf.d/zz-gpunodes-proxy"
    assert host_proxies.apt_file("gpu") == "/etc/apt/apt.conf.d/zz-gpunodes-gpu-proxy"


def test_dnf_gets_the_proxy_in_the_sources_and_in_its_environment(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = spec_from(wanted(**SECRETLY), KNOWN).proxies
    remote = Repository("kubernetes", "https://pkgs.test/rpm/", "/key")
    text = sources.render(remote, "/key", False, proxies)
    assert text.endswith("proxy=http://proxy.test:3128\nproxy_username=builder\nproxy_password=s@fe!word\n")
    assert "proxy" not in sources.render(Repository("k", "https://a.intern.test/", "/key"), "/key", False, proxies)
    assert "proxy" not in sources.render(remote, "/key", True, proxies)

    monkeypatch.setattr(packages, "detect", packages.Dnf)
    spec = spec_from({"repositories": [vars(remote)], "proxies": SECRETLY}, KNOWN)
    changes = converge(spec)
    assert (machine / "source.repo").stat().st_mode & 0o777 == 0o600
    assert converge(spec).actions == []
    assert not (machine / "apt/proxy").exists()
    manager = sources.Sources(changes).manager
    assert isinstance(manager, packages.Dnf)
    assert manager.environment["https_proxy"] == f"http://{CREDENTIALS}@proxy.test:3128"


@pytest.mark.skipif(not Path("/usr/bin/apt-get").exists(), reason="apt is not installed")
def test_apt_reads_the_file(site: tuple[str, list[Mapping[str, str]]], tmp_path: Path) -> None:
    """The real apt-get, with a source that only the proxy reaches, and one that is reached directly."""
    with forward_proxy.running(DECODED, mirror="127.0.0.1") as proxy:
        text = host_proxies.for_apt(through(proxy, CREDENTIALS, "127.0.0.0/8"), {"127.0.0.1"})
        config = tmp_path / "apt.conf"
        config.write_text(f'Dir "{tmp_path}";\nAPT::Sandbox::User "{pwd.getpwuid(os.getuid()).pw_name}";\n{text}')
        for folder in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "etc/apt"):
            (tmp_path / folder).mkdir(parents=True)
        urls = [f"http://{host}:{site[0]}/" for host in ("mirror.test", "127.0.0.1")]
        (tmp_path / "etc/apt/sources.list").write_text("".join(f"deb [trusted=yes] {url} ./\n" for url in urls))
        subprocess.run(
            ["apt-get", "update", "-oDebug::NoLocking=1"],
            env={"PATH": os.environ["PATH"], "APT_CONFIG": str(config), "LC_ALL": "C"},
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert {record.status for record in proxy.records} == {200}
        assert {target.split("/")[2] for target in proxy.targets} == {f"mirror.test:{site[0]}"}
    assert len(site[1]) > len(proxy.records)


# Programs that must use them, and those that must not


@pytest.mark.usefixtures("machine")
def test_pulls_of_ctr_use_the_variables_of_containerd(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], Mapping[str, str]]] = []

    def run(argv: list[str], *_: Any, environment: Mapping[str, str] | None = None) -> CommandResult:
        seen.append((argv, environment or {}))
        return CommandResult(argv, 0, "", "")

    converge(spec_from(wanted(**SECRETLY), KNOWN))
    for module in (images, docker_images):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(docker_images, "must", lambda *_: "")
    images.start_fetching(["a.test/image:1"])
    assert "--property=EnvironmentFile=-/etc/gpunodes/proxy-containerd.env" in seen[0][0]
    monkeypatch.setattr(docker_images, "present", lambda _: False)
    with pytest.raises(MachineProblem, match="Docker does not have"):
        docker_images._load(["a.test/image:1"])
    fetch = next(environment for argv, environment in seen if "fetch" in argv)
    assert fetch["HTTPS_PROXY"] == f"http://{CREDENTIALS}@proxy.test:3128"
    assert SECRET not in json.dumps([argv for argv, _ in seen])


@pytest.fixture
def kubeadm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Mapping[str, str]]:
    """Runs kubeadm's stand-in, which prints its environment."""
    monkeypatch.setattr(command, "PRIVATE", str(tmp_path / "private"))
    monkeypatch.setattr("gpunodes.ansible.module_utils.process.PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "kubeadm"
    script = f"import json, os; open({str(tmp_path / 'environment')!r}, 'w').write(json.dumps(dict(os.environ)))"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)

    def run() -> Mapping[str, str]:
        command.run("init", [], 60)
        found: Mapping[str, str] = json.loads((tmp_path / "environment").read_text())
        return found

    return run


def test_kubeadm_has_no_proxy_to_copy_into_static_pods(
    kubeadm: Callable[[], Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubeadm copies variables that end with _proxy, in any case, and are not empty (GetProxyEnvVars)."""
    for name in ("HTTP_PROXY", "https_proxy", "No_Proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.test:3128")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    copied = {name: value for name, value in kubeadm().items() if name.lower().endswith("_proxy") and value}
    assert copied == {}
