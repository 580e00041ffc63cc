"""The pure code that travels to the machines: parsers, the ledger, kubeconfigs, certificates and keys."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from gpunodes.ansible.module_utils.gpunodes import (
    cluster,
    docker_images,
    facts,
    firewall,
    host,
    kube_api,
    kubeadm,
    kubeconfig,
    ledger,
    openpgp,
    packages,
    process,
)
from gpunodes.ansible.module_utils.gpunodes.problem import MachineProblem
from gpunodes.ansible.module_utils.gpunodes.process import CommandResult
from gpunodes.planner import reports

MODULES = sorted(
    path for path in (Path(host.__file__).parents[2] / "modules").glob("*.py") if path.name != "__init__.py"
)


class TestPackages:
    def test_only_whole_packages_count(self) -> None:
        listing = "kubelet\thi \t1.36.3-1.1\ncontainerd\tiF \t1.7.24\nrunc\tii \t1.1.15\nsocat\trc \t1.8\n"
        found = packages.parse_dpkg(listing)
        assert found == {
            "kubelet": packages.PackageState("1.36.3-1.1", held=True),
            "runc": packages.PackageState("1.1.15", held=False),
        }

    def test_madison_gives_versions_best_first(self) -> None:
        listing = (
            " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.1-1.1 | http://m/deb  Packages\n"
            " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.3-1.1 | http://m/deb Sources\n"
        )
        assert packages.parse_madison(listing) == {"kubelet": ["1.36.3-1.1", "1.36.1-1.1"]}

    def test_simulation_tells_new_upgraded_and_removed(self) -> None:
        listing = (
            "Remv containerd [1.7.24]\nInst containerd.io (2.2.9-1 Docker:stable [amd64])\n"
            "Inst libseccomp2 [2.5.4-1] (2.5.4-2 Debian:13 [amd64])\nConf containerd.io (2.2.9-1)\n"
        )
        assert packages.parse_simulation(listing) == packages.Effects(
            ["containerd.io"], ["containerd"], ["libseccomp2"]
        )

    @pytest.mark.parametrize(
        ("pattern", "version", "good"),
        [
            ("1.36.*", "1.36.3-1.1", True),
            ("1.36.3-*", "1.36.3-1.1", True),
            ("1.36.3-*", "1.36.30-1.1", False),
            ("1.3.*", "1.36.3-1.1", False),
            ("1.36.*", "0:1.36.3-150500.1.1", True),
            ("", "anything", True),
        ],
    )
    def test_fits(self, pattern: str, version: str, good: bool) -> None:
        assert packages.fits(packages.RequestedPackage("kubelet", pattern), version) is good

    def test_choosing_says_what_there_is(self) -> None:
        wanted = packages.RequestedPackage("kubelet", "1.36.9-*")
        with pytest.raises(MachineProblem, match=r"no kubelet 1\.36\.9-\*; available: 1.36.3-1.1"):
            packages.choose(wanted, ["1.36.3-1.1"])
        assert (
            packages.choose(packages.RequestedPackage("kubelet", "1.36.*"), ["1.36.3-1.1", "1.36.1-1.1"])
            == "1.36.3-1.1"
        )

    def test_apt_error_is_its_first_with_what_is_unmet(self) -> None:
        text = (
            "Reading package lists...\n kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable\n"
            "E: Unable to correct problems, you have held broken packages.\nE: second\n"
        )
        assert packages.apt_error(text) == (
            "E: Unable to correct problems, you have held broken packages.; "
            "kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable"
        )

    def test_dnf_transaction(self) -> None:
        listing = (
            "Installing:\n kubelet  x86_64  1.36.3-150500.1.1  gpunodes-kubernetes  12 M\n"
            "Removing:\n runc  x86_64  1.1  @appstream  1 M\nTransaction Summary:\n"
        )
        assert packages.parse_dnf_transaction(listing) == packages.Effects(["kubelet"], ["runc"], [])


class TestLedger:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = str(tmp_path / "lib" / "ledger.json")
        book = ledger.Ledger()
        book.note_packages(["runc", "runc"])
        book.note_file("/etc/a", ledger.OldFile("before", 0o640, 1, 2))
        book.note_service("containerd", {"enabled": False, "active": False})
        book.save(path)
        assert ledger.load(path) == book
        assert book.packages == ["runc"]
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700

    def test_the_first_note_stands(self) -> None:
        book = ledger.Ledger()
        book.note_file("/etc/a", ledger.OldFile(None))
        book.note_file("/etc/a", ledger.OldFile("ours"))
        book.note_sysctl("net.ipv4.ip_forward", "0")
        book.note_sysctl("net.ipv4.ip_forward", "1")
        assert book.files["/etc/a"].content is None
        assert book.sysctls == {"net.ipv4.ip_forward": "0"}

    def test_a_restart_is_owed_until_done(self) -> None:
        book = ledger.Ledger()
        book.note_restart("containerd")
        assert ledger.from_json(book.to_json()).restarts == ["containerd"]
        book.restarted("containerd")
        assert book.restarts == []

    def test_none_is_an_empty_one(self, tmp_path: Path) -> None:
        assert ledger.load(str(tmp_path / "none")) == ledger.Ledger()

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', json.dumps({"version": 2, "files": {}})])
    def test_a_damaged_or_later_one_is_refused(self, text: str) -> None:
        with pytest.raises(MachineProblem):
            ledger.from_json(text)


class TestHost:
    def test_swap_lines_go_and_come_back(self) -> None:
        fstab = "UUID=1 / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n# /old none swap sw 0 0\n"
        quiet = host.without_swap(fstab)
        assert "\n/swap.img" not in quiet
        assert host.without_swap(quiet) == quiet
        assert host.with_swap(quiet) == fstab

    def test_active_swaps(self) -> None:
        listing = "Filename\tType\tSize\tUsed\tPriority\n/dev/vda2 partition 1 0 -2\n"
        assert host.active_swaps(listing) == ["/dev/vda2"]

    def test_services(self) -> None:
        listing = (
            "Id=containerd.service\nActiveState=active\nUnitFileState=enabled\n\n"
            "Id=kubelet.service\nActiveState=inactive\nUnitFileState=\n"
        )
        assert host.parse_services(listing) == {
            "containerd": {"enabled": True, "active": True},
            "kubelet": {"enabled": False, "active": False},
        }

    def test_a_file_follows_its_package_version(self) -> None:
        file = host.File("/etc/c", package="containerd", contents={"1.[67].*": "two", "2.*": "three"})
        assert host.variant(file, {"containerd": "1.7.24~ds1-6"}).content == "two"
        assert host.variant(file, {"containerd": "2.2.9-1"}).content == "three"
        with pytest.raises(MachineProblem, match=r"containerd is 3\.0"):
            host.variant(file, {"containerd": "3.0"})

    def test_apt_source(self) -> None:
        source = host.Repository("kubernetes", "http://m/v1.36/deb/", "KEY")
        assert host.render_repository(source, "/k.asc", apt=True) == (
            "Types: deb\nURIs: http://m/v1.36/deb/\nSuites: /\nSigned-By: /k.asc\n"
        )
        suite = host.Repository("docker", "http://m/debian", "KEY", suite="bookworm", components="stable")
        assert "Suites: bookworm\nComponents: stable\n" in host.render_repository(suite, "/k.asc", apt=True)

    def test_empty_parameters_do_not_hide_defaults(self) -> None:
        spec = host.spec_from({"files": [{"path": "/a", "content": "x", "mode": None}], "swap_off": True})
        assert spec.files == (host.File("/a", "x"),)
        assert spec.swap_off

    def test_missing_parents(self, tmp_path: Path) -> None:
        assert host.missing_parents(str(tmp_path / "a" / "b" / "file")) == [str(tmp_path / "a"), str(tmp_path / "a/b")]

    def test_a_wrong_key_is_refused(self) -> None:
        source = host.Repository("kubernetes", "http://m/", KEY, fingerprint="00")
        with pytest.raises(MachineProblem, match=FINGERPRINT):
            host.checked_key(KEY, source)
        with pytest.raises(MachineProblem, match="not an OpenPGP key"):
            host.checked_key("<html>", source)
        with pytest.raises(MachineProblem, match="plain HTTP"):
            host.checked_key(KEY, host.Repository("kubernetes", "http://m/", "http://m/key"))
        host.checked_key(KEY, host.Repository("kubernetes", "http://m/", KEY, fingerprint=FINGERPRINT.lower()))


# Made for this test with Ed25519; nothing is signed by it.
KEY = """-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEawGT8hYJKwYBBAHaRw8BAQdAnehdWTWYShR7GtZub5cqYDt5kvYOp2RkQ4KH
+LatUKq0E2dwdW5vZGVzIGxhYiBtaXJyb3KIkAQTFggAOBYhBINrGt4kdwI+/wTJ
PNW+LQWxg07jBQJrAZPyAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJENW+
LQWxg07j0Y0BAI+OJxdEOtoYJPHMX1HXXUIwzwV/lXMPLqhqTztKiaH3AQDGyrB8
E8kTDqhKytdsO+MRgpsCT66IGV5lTUJsLkGJCQ==
=9n4c
-----END PGP PUBLIC KEY BLOCK-----
"""
FINGERPRINT = "836B1ADE2477023EFF04C93CD5BE2D05B1834EE3"


class TestOpenpgp:
    def test_fingerprint(self) -> None:
        assert openpgp.fingerprints(KEY) == [FINGERPRINT]

    def test_as_people_write_it(self) -> None:
        assert openpgp.plain("836b 1ADE 2477") == "836B1ADE2477"

    @pytest.mark.parametrize("text", ["", "no key", KEY[:80], KEY.replace("mDME", "!!!!")])
    def test_no_key(self, text: str) -> None:
        assert openpgp.fingerprints(text) == []


# A CA as kubeadm makes it (openssl req -x509 -newkey ec, CN=kubernetes); its hash by openssl as kubernetes.io shows.
CA = """-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUIYQf4d8kz+9qF61tY6hNj9yHoC4wCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKa3ViZXJuZXRlczAeFw0yNjExMjExMzQ3MjVaFw0zNjExMTgx
MzQ3MjVaMBUxEzARBgNVBAMMCmt1YmVybmV0ZXMwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARRWrKRy5gW7qIFt2L/BUkNz6C6MkUVHjOR21EPMrYKPZifkHqLw6oy
pKrCw3HZAo1GOzrzUeI+c7r2DdZaq7Rxo1MwUTAdBgNVHQ4EFgQUlLF0nZNNzpXU
Bh05xX10QkVOTqAwHwYDVR0jBBgwFoAUlLF0nZNNzpXUBh05xX10QkVOTqAwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA+e4nlIBginULISzwV3mf
O9nOAF6CncwqbWsBuMXpZ08CIQDyJ8dD27KXFUBG7sQ9VSqrLrG+Wkhun3w8JHoQ
vN9XtA==
-----END CERTIFICATE-----
"""
CA_HASH = "sha256:958f10a720cbcb657c0a2e6c5684ae05cdcb88e85c44745969411256fb9f746b"


class TestKubeconfig:
    def test_ca_hash(self) -> None:
        assert kubeconfig.ca_hash(CA) == CA_HASH

    def test_parse(self) -> None:
        config = kubeconfig.parse(kubeconfig_text())
        assert config.server == "https://10.0.0.1:6443"
        assert config.ca_hash == CA_HASH
        assert config.certificate == CA
        assert config.key is None

    @pytest.mark.parametrize("text", ["", "apiVersion: v1\n", "clusters:\n- cluster:\n    server: https://x\n"])
    def test_half_a_file(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "kubelet.conf"
        path.write_text(text)
        assert kubeconfig.load(str(path)) is None
        with pytest.raises(MachineProblem):
            kubeconfig.parse(text)

    def test_no_certificate(self) -> None:
        with pytest.raises(MachineProblem):
            kubeconfig.ca_hash("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def kubeconfig_text() -> str:
    import base64

    data = base64.b64encode(CA.encode()).decode()
    return (
        "apiVersion: v1\nclusters:\n- cluster:\n"
        f"    certificate-authority-data: {data}\n    server: https://10.0.0.1:6443\n  name: kubernetes\n"
        "kind: Config\nusers:\n- name: default\n  user:\n"
        f"    client-certificate-data: {data}\n    client-key: /var/lib/kubelet/pki/x.pem\n"
    )


class TestFacts:
    def test_os_release(self) -> None:
        text = (
            'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n# x=1\n'
        )
        assert facts.parse_os_release(text) == {
            "id": "debian",
            "version": "13",
            "codename": "trixie",
            "name": "Debian GNU/Linux 13 (trixie)",
        }

    def test_memory(self) -> None:
        assert facts.parse_memory("MemTotal:        4018596 kB\nMemFree: 1 kB\n") == 3924

    def test_listening(self) -> None:
        text = (
            "  sl  local_address rem_address   st\n   0: 00000000:0016 00000000:0000 0A 0\n"
            "   1: 0100007F:1F90 00000000:0000 01 0\n   2: 00000000000000000000000000000000:192B 0:0 0A 0\n"
        )
        assert facts.parse_listening(text) == [22, 6443]

    def test_sources_are_filled_in_for_the_system(self) -> None:
        debian: dict[str, str | None] = {"id": "debian", "version": "12", "codename": "bookworm"}
        rocky: dict[str, str | None] = {"id": "rocky", "version": "9.4", "codename": None}
        docker = {"name": "docker", "url": "https://d/{system}", "suite": "{codename}", "systems": ["debian 12"]}
        flat = {"name": "kubernetes", "url": "https://k/{format}/", "suite": "/"}
        assert facts.filled(docker, debian)["url"] == "https://d/debian/dists/bookworm/InRelease"
        assert facts.filled(flat, debian)["url"] == "https://k/deb/InRelease"
        assert facts.filled(flat, rocky)["url"] == "https://k/rpm/repodata/repomd.xml"
        assert facts.applies(docker, debian)
        assert not facts.applies(docker, rocky)
        assert facts.applies(flat, rocky)
        ubuntu = {"id": "ubuntu", "version": "22.04", "codename": "jammy", "name": "Ubuntu 22.04"}
        assert facts.applies({"systems": ["ubuntu 22.04"]}, ubuntu)
        assert not facts.applies({"systems": ["ubuntu 24.04"]}, ubuntu)
        assert [facts.applies({"gpus": True}, ubuntu, gpus) for gpus in (True, False)] == [True, False]


class TestKubeadm:
    def test_failed_checks_come_first(self) -> None:
        text = (
            "[preflight] Running pre-flight checks\n[preflight] Some fatal errors occurred:\n"
            "\t[ERROR Port-10250]: Port 10250 is in use\n\t[ERROR Swap]: running with swap on is not supported\n"
            "error: error execution phase preflight: preflight checks failed\n"
        )
        assert kubeadm.kubeadm_error(text) == (
            "[ERROR Port-10250]: Port 10250 is in use; [ERROR Swap]: running with swap on is not supported"
        )

    def test_images_are_not_listed_one_by_one(self) -> None:
        text = "\t[ERROR ImagePull]: [failed to pull image a: no, failed to pull image b: no]\n"
        assert kubeadm.kubeadm_error(text) == "[ERROR ImagePull]: [failed to pull image a: no; and others"

    def test_the_phase_that_failed(self) -> None:
        text = (
            "error execution phase kubelet-wait-bootstrap: failed while waiting for TLS bootstrap\n"
            "To see the stack trace of this error execute with --v=5 or higher\n"
        )
        message = kubeadm.kubeadm_error(text)
        assert message == "error execution phase kubelet-wait-bootstrap: failed while waiting for TLS bootstrap"
        done = CommandResult(["kubeadm"], 1, "", text)
        assert kubeadm.failure(done, "no such host") == f"{message}; kubelet: no such host"

    def test_a_slow_runtime_is_asked_again_and_another_failure_is_not(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        slow = "[ERROR CRI]: could not connect to the container runtime: rpc error: code = DeadlineExceeded desc = ..."
        answers = [slow, slow, "[ERROR Port-10250]: Port 10250 is in use", ""]
        calls = iter(answers)
        monkeypatch.setattr(kubeadm, "PRIVATE", str(tmp_path / "private"))
        monkeypatch.setattr(kubeadm, "_RUNTIME_PAUSE_S", 0)
        monkeypatch.setattr(kubeadm, "kubelet_error", lambda _: "")
        monkeypatch.setattr(kubeadm, "run_while_connected", lambda argv, _: CommandResult(argv, 1, "", next(calls)))
        with pytest.raises(MachineProblem, match="Port 10250 is in use"):
            kubeadm._kubeadm("join", [{"kind": "JoinConfiguration"}], 60)
        assert list(calls) == [""]

    def test_patches_are_files_that_kubeadm_finds_while_it_runs(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        private = tmp_path / "private"
        seen: dict[str, str] = {}

        def run(argv: list[str], _: float) -> CommandResult:
            seen.update((path.name, path.read_text()) for path in (private / "patches").iterdir())
            return CommandResult(argv, 0, "", "")

        monkeypatch.setattr(kubeadm, "PRIVATE", str(private))
        monkeypatch.setattr(kubeadm, "run_while_connected", run)
        kubeadm._kubeadm("init", [], 60, patches={"etcd0+strategic": {"spec": {"priority": 1}}})
        assert seen == {"etcd0+strategic.json": '{"spec": {"priority": 1}}'}
        assert not private.exists()
        assert kubeadm._complete({"kind": "InitConfiguration"}, "t")["patches"] == {"directory": f"{private}/patches"}

    def test_the_kubelet_is_quoted_only_where_it_matters(self) -> None:
        done = CommandResult(["kubeadm"], 1, "", "\t[ERROR Mem]: 900 MB is less than 1700 MB\n")
        assert kubeadm.failure(done, "something old") == "[ERROR Mem]: 900 MB is less than 1700 MB"

    def test_why_the_kubelet_ended(self) -> None:
        journal = (
            'E1121 13:24:01.100000     890 run.go:72] "command failed" err="failed to run Kubelet: running with swap"\n'
            'I1121 13:24:02.100000     890 server.go:1] "Starting"\n'
        )
        assert kubeadm.parse_kubelet(journal) == "failed to run Kubelet: running with swap"

    def test_the_last_error_line(self) -> None:
        journal = (
            'E1121 13:24:01.1     890 a.go:1] "first" err="x"\nE1121 13:24:02.1     890 b.go:2] "second" err="y"\n'
        )
        assert kubeadm.parse_kubelet(journal) == '"second" err="y"'
        assert kubeadm.parse_kubelet("") == ""

    def test_token_form(self) -> None:
        name, _, secret = kubeadm.new_token().partition(".")
        assert (len(name), len(secret)) == (6, 16)
        assert kubeadm.new_token() != kubeadm.new_token()


class TestFirewall:
    RULES = (
        "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:MINE - [0:0]\n"
        '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES\n'
        "-A PREROUTING -j MINE\n-A KUBE-SERVICES -j RETURN\n"
        '-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG\nCOMMIT\n'
    )

    def test_only_ours_go(self) -> None:
        kept = firewall.without(self.RULES, firewall.KUBERNETES)
        assert kept == "*nat\n:PREROUTING ACCEPT [0:0]\n:MINE - [0:0]\n-A PREROUTING -j MINE\nCOMMIT\n"
        assert firewall.without(kept, firewall.KUBERNETES) == kept

    def test_docker_leaves_no_rule(self) -> None:
        # What Docker 26 has in its tables, between two rules of somebody else.
        rules = (
            "*nat\n:POSTROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n"
            "-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER\n-A POSTROUTING -j MINE\n"
            "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n-A DOCKER -i docker0 -j RETURN\nCOMMIT\n"
            "*filter\n:DOCKER-USER - [0:0]\n-A FORWARD -j DOCKER-USER\n-A FORWARD -j DOCKER-ISOLATION-STAGE-1\n"
            "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
            "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n-A FORWARD -i docker01 -j ACCEPT\n"
            "-A DOCKER-USER -j RETURN\nCOMMIT\n"
        )
        assert firewall.without(rules, firewall.DOCKER) == (
            "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -j MINE\nCOMMIT\n"
            "*filter\n-A FORWARD -i docker01 -j ACCEPT\nCOMMIT\n"
        )

    def test_tables(self) -> None:
        assert firewall.parse_tables("table ip nat\ntable inet mine\n") == ["ip nat", "inet mine"]

    def test_empty_tables(self) -> None:
        chain = "table ip nat {\n\tchain PREROUTING {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n"
        assert firewall.has_no_rules(chain + "\t}\n}\n")
        assert not firewall.has_no_rules(chain + "\t\ttcp dport 22 accept\n\t}\n}\n")
        assert not firewall.has_no_rules(chain.replace("accept", "drop") + "\t}\n}\n")


class TestCluster:
    NODE: ClassVar[dict[str, Any]] = {
        "metadata": {
            "name": "worker-1",
            "annotations": {cluster.READY_BOOT: "boot"},
            "labels": {},
        },
        "spec": {},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "machineID": "m", "systemUUID": "U", "bootID": "boot"},
        },
    }

    def pod(self, **status: object) -> dict[str, object]:
        return {"metadata": {"name": "p"}, "spec": {"nodeName": "worker-1"}, "status": status}

    def test_a_proven_node(self) -> None:
        described = cluster.describe(self.NODE, [])
        assert described["verified"]
        assert (described["role"], described["address"], described["product_uuid"]) == ("worker", "10.0.0.2", "u")

    @pytest.mark.parametrize("changed", [None, "uid", "machine_id", "boot_id"])
    def test_a_node_of_another_machine_is_neither_drained_nor_deleted(
        self, changed: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the choice and its turn the name may have become another machine's: looked at again, and by uid."""
        node = {**self.NODE, "metadata": {**self.NODE["metadata"], "uid": "uid-1"}}
        calls: list[tuple[Any, ...]] = []

        class Client:
            def find(self, path: str) -> Any:
                return node

            def call(self, *words: Any) -> None:
                calls.append(words)

        def drained(*_: Any) -> bool:
            calls.append(("drain",))
            return True

        monkeypatch.setattr("gpunodes.ansible.module_utils.gpunodes.kube_api.admin", Client)
        monkeypatch.setattr(cluster, "_drain", drained)
        described = cluster.describe(node, [])
        expected = {key: described[key] for key in ("uid", "boot_id", "machine_id", "product_uuid")}
        if changed:
            with pytest.raises(MachineProblem, match=f"belongs to another machine now: it reports {changed}"):
                cluster.remove("worker-1", 10, False, False, {**expected, changed: "before"})
            assert calls == []
        else:
            cluster.remove("worker-1", 10, False, False, expected)
            assert calls == [
                ("drain",),
                ("DELETE", "/api/v1/nodes/worker-1", {"preconditions": {"uid": "uid-1"}}),
            ]

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"labels":' * 100_000, "x" * 1_000_000])
    def test_an_annotation_that_cannot_be_read_tells_of_nothing_of_ours(self, text: str) -> None:
        """A node that writes it keeps nobody from the others."""
        annotations = {**self.NODE["metadata"]["annotations"], "gpunodes.dev/managed": text}
        described = cluster.describe(
            {**self.NODE, "metadata": {**self.NODE["metadata"], "annotations": annotations}}, []
        )
        assert described["managed"] == {"labels": {}, "taints": []}

    def test_what_one_node_reports_oddly_is_its_own_trouble(self) -> None:
        """The cluster's report keeps its shape, whatever a kubelet writes: nobody else's command is refused for it."""
        info = {**self.NODE["status"]["nodeInfo"], "kubeletVersion": "", "containerRuntimeVersion": "X://"}
        resources = {"nvidia.com/gpu": str((1 << 63) - 1), "nvidia.com/gpu.shared": str((1 << 63) - 1)}
        addresses = [{"type": "InternalIP", "address": "not an ip"}]
        status = {**self.NODE["status"], "nodeInfo": info, "allocatable": resources, "addresses": addresses}
        told = cluster.describe({**self.NODE, "status": status}, [])
        assert (told["address"], told["version"], told["runtime"], told["gpus"]) == ("", "", "", 0)
        assert [told[key] for key in ("ready", "verified", "gpus_verified")] == [False] * 3
        assert told["reason"] == "its kubelet reports an invalid address and version and runtime"
        whole = {"version": "v1.36.3", "endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "0" * 64, "nodes": [told]}
        assert reports.cluster_problem(whole) == ""

    def test_a_reboot_ends_the_proof(self) -> None:
        info = {**self.NODE["status"]["nodeInfo"], "bootID": "later"}
        node = {**self.NODE, "status": {**self.NODE["status"], "nodeInfo": info}}
        assert not cluster.describe(node, [])["verified"]

    def test_a_pod_that_waits_ends_the_proof_and_is_the_reason(self) -> None:
        state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        described = cluster.describe(self.NODE, [self.pod(containerStatuses=[{"state": state}])])
        assert not described["verified"]
        assert described["reason"] == "pod p: ImagePullBackOff: no such image"

    def test_pod_problems(self) -> None:
        ready = [{"type": "Ready", "status": "True"}]
        assert cluster.pod_problem(self.pod(conditions=ready)) == ""
        assert cluster.pod_problem(self.pod(phase="Pending")) == "pod p is pending"
        unplaced = [{"type": "PodScheduled", "status": "False", "message": "no nodes"}]
        assert cluster.pod_problem(self.pod(conditions=unplaced)) == "pod p: no nodes"

    def test_a_node_is_proven_step_by_step_and_nothing_else_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ready = [{"type": "Ready", "status": "True"}]
        up = [*ready, {"type": "NetworkUnavailable", "status": "False"}]
        parts = ({"k8s-app": "kube-proxy"}, {cluster.NETWORK_LABEL: "flannel"})
        here = [
            {"metadata": {"name": f"p{n}", "labels": labels}, "spec": {"nodeName": "worker-1"}, "status": {}}
            for n, labels in enumerate(parts)
        ]
        phases = iter(["Pending", "Succeeded"])
        asked: list[str] = []

        class Api:
            def call(self, verb: str, path: str, *_: object) -> None:
                asked.append(f"{verb} {path}")

            def find(self, path: str) -> object:
                asked.append(path)
                if path == "/api/v1/nodes/worker-1":
                    return {**TestCluster.NODE, "status": {**TestCluster.NODE["status"], "conditions": up}}
                return {"metadata": {"name": "probe"}, "status": {"phase": next(phases)}}

            def get(self, path: str, **query: str) -> dict[str, object]:
                asked.append(f"{path} {query}")
                if "kube-dns" in str(query):
                    return {"items": [TestCluster().pod(conditions=ready)]}
                if len([line for line in asked if "fieldSelector" in line]) > 1:
                    for pod in here:
                        pod["status"] = {"conditions": ready}
                return {"items": here}

        monkeypatch.setattr(kube_api, "admin", Api)
        monkeypatch.setattr(cluster, "_clean", lambda *_: None)
        monkeypatch.setattr(cluster, "_POLL_S", 0)
        assert cluster.wait_until_ready(["worker-1"], "image", 60) == {"worker-1": ""}
        probes = [line for line in asked if "gpunodes-ready-" in line]
        assert len(probes) == 2
        assert [line for line in asked if "/nodes" in line] == [
            *2 * ["/api/v1/nodes/worker-1"],
            "PATCH /api/v1/nodes/worker-1",
        ]

    def test_a_network_that_dies_is_the_cause_of_what_happens_to_the_probe(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The probe's event named a file that was missing, and not the program that should have written it."""
        ready = [{"type": "Ready", "status": "True"}, {"type": "NetworkUnavailable", "status": "False"}]
        node = {**TestCluster.NODE, "status": {**TestCluster.NODE["status"], "conditions": ready}}
        restarts = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}

        def pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
            meta = {"name": name, "namespace": "kube-flannel", "labels": labels}
            return {"metadata": meta, "spec": {"nodeName": "worker-1"}, "status": {"conditions": ready}}

        here = [pod("proxy", {"k8s-app": "kube-proxy"}), pod("flannel", {cluster.NETWORK_LABEL: "flannel"})]

        class Api:
            def call(self, verb: str, *_: object) -> None:
                # The network dies after the probe pod was made.
                here[1]["status"] = {"containerStatuses": [{"state": restarts}]}

            def find(self, path: str) -> object:
                return node if "/nodes/" in path else {"metadata": {"name": "probe"}, "status": {"phase": "Pending"}}

            def get(self, path: str, **query: str) -> dict[str, object]:
                if path.endswith("/flannel/log"):
                    return {"message": "iptables: exec format error\n"}
                if "kube-dns" in str(query):
                    return {"items": []}
                return {"items": here}

        monkeypatch.setattr(kube_api, "admin", Api)
        monkeypatch.setattr(cluster, "_clean", lambda *_: None)
        monkeypatch.setattr(cluster, "_POLL_S", 0.01)
        assert cluster.wait_until_ready(["worker-1"], "image", 0.1) == {
            "worker-1": "pod flannel: CrashLoopBackOff: back-off 20s; its log ends with: iptables: exec format error"
        }

    def test_probe_tolerates_all_and_needs_no_token(self) -> None:
        spec = cluster.probe_pod("n", "worker-1", "image")["spec"]
        assert spec["nodeName"] == "worker-1"
        assert spec["tolerations"] == [{"operator": "Exists"}]
        assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_are_documented(path: Path) -> None:
    words = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    documentation = yaml.safe_load(words["DOCUMENTATION"])
    assert documentation["module"] == path.stem
    assert yaml.safe_load(words["EXAMPLES"])
    assert yaml.safe_load(words["RETURN"])
    source = path.read_text(encoding="utf-8")
    assert "supports_check_mode=True" in source
    for name in documentation.get("options") or {}:
        assert f'"{name}": {{"type"' in source or f'"{name}": {{\n' in source, name


class TestDockerImages:
    @pytest.fixture(autouse=True)
    def programs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """docker, ctr and kubeadm of this test: an image is a line in a file, by all names that Docker finds it by."""
        images = tmp_path / "images"
        images.write_text("registry.k8s.io/pause:3.10.2\n")
        kubeadm = (
            'case "$*" in *images*) echo registry.k8s.io/kube-apiserver:v1.36.3 registry.k8s.io/kube-proxy:v1.36.3'
            " registry.k8s.io/coredns/coredns:v1.14.2 registry.k8s.io/pause:3.10.2;; *) echo v1.36.3;; esac"
        )
        docker = (
            f'case "$*" in\n"image ls"*) grep -v @ {images};;\n'
            f'"image inspect"*) for name; do :; done; grep -qxF "$name" {images};;\n'
            f"load*) [ -e {tmp_path}/old ] || cat {tmp_path}/exported >>{images};;\nesac"
        )
        ctr = f'case "$*" in *export*) shift 4; printf "%s\\n" "$@" >{tmp_path}/exported;; esac'
        for name, text in {"kubeadm": kubeadm, "docker": docker, "ctr": ctr}.items():
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        for module in (docker_images, process):
            monkeypatch.setattr(module, "PATH", f"{tmp_path}/bin:{process.PATH}")
        return tmp_path

    def test_only_what_is_mirrored_and_missing_is_loaded(self) -> None:
        wanted = ["registry.k8s.io/pause:3.10.2", "ghcr.io/flannel-io/flannel:v0.26.7", "quay.io/x:1"]
        mirrored = ["registry.k8s.io", "ghcr.io"]
        ours = ["ghcr.io/flannel-io/flannel:v0.26.7", "registry.k8s.io/kube-proxy:v1.36.3"]
        ours.append("registry.k8s.io/coredns/coredns:v1.14.2")
        assert docker_images.load_missing(wanted, mirrored, False, True) == [f"load {name}" for name in ours]
        assert len(docker_images.load_missing(wanted, mirrored, True, True)) == 4
        assert docker_images.load_missing(wanted, [], False, True) == []

    @pytest.mark.parametrize("name", ["nvcr.io/plugin:v0.19.0", f"nvcr.io/plugin:v0.19.0@sha256:{'a' * 64}"])
    def test_an_image_is_loaded_once(self, name: str) -> None:
        """A list of Docker's images has no digests: by it, one that is pinned was never there."""
        assert docker_images.load_missing([name], ["nvcr.io"], False, False) == [f"load {name}"]
        assert docker_images.load_missing([name], ["nvcr.io"], False, False) == []

    def test_an_image_that_docker_does_not_keep_by_its_digest_is_said(self, programs: Path) -> None:
        """Docker's older store loads it and then does not find it: the node would ask the public registry."""
        (programs / "old").touch()
        with pytest.raises(MachineProblem, match="use Docker's containerd image store"):
            docker_images.load_missing([f"nvcr.io/plugin:v0.19.0@sha256:{'a' * 64}"], ["nvcr.io"], False, False)
