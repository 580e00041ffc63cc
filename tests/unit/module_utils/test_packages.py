"""Package managers: their listings, versions and errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gpunodes.ansible.module_utils import packages
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult


def test_only_whole_packages_count() -> None:
    listing = "kubelet\thi \t1.36.3-1.1\ncontainerd\tiF \t1.7.24\nrunc\tii \t1.1.15\nsocat\trc \t1.8\n"
    found = packages.parse_dpkg(listing)
    assert found == {
        "kubelet": packages.PackageState("1.36.3-1.1", held=True),
        "runc": packages.PackageState("1.1.15", held=False),
    }


def test_madison_gives_versions_best_first() -> None:
    listing = (
        " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.1-1.1 | http://m/deb  Packages\n"
        " kubelet | 1.36.3-1.1 | http://m/deb  Packages\n kubelet | 1.36.3-1.1 | http://m/deb Sources\n"
    )
    assert packages.parse_madison(listing) == {"kubelet": ["1.36.3-1.1", "1.36.1-1.1"]}


def test_simulation_tells_new_upgraded_and_removed() -> None:
    listing = (
        "Remv containerd [1.7.24]\nInst containerd.io (2.2.9-1 Docker:stable [amd64])\n"
        "Inst libseccomp2 [2.5.4-1] (2.5.4-2 Debian:13 [amd64])\nConf containerd.io (2.2.9-1)\n"
    )
    assert packages.parse_simulation(listing) == packages.Effects(["containerd.io"], ["containerd"], ["libseccomp2"])


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
def test_fits(pattern: str, version: str, good: bool) -> None:
    assert packages.fits(packages.RequestedPackage("kubelet", pattern), version) is good


def test_choosing_says_what_there_is() -> None:
    wanted = packages.RequestedPackage("kubelet", "1.36.9-*")
    with pytest.raises(MachineProblem, match=r"no kubelet 1\.36\.9-\*; available: 1.36.3-1.1"):
        packages.choose(wanted, ["1.36.3-1.1"])
    assert packages.choose(packages.RequestedPackage("kubelet", "1.36.*"), ["1.36.3-1.1", "1.36.1-1.1"]) == "1.36.3-1.1"


def test_a_source_that_apt_cannot_reach_is_why_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """`apt-get update` then ends with 0 (apt 2.6.1)."""
    text = (
        "Err:1 http://127.0.0.1:9 ./ InRelease\n  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: "
        "Connection refused)\nReading package lists...\nW: Failed to fetch http://127.0.0.1:9/./InRelease  Could not "
        "connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection refused)\nW: Some index files failed to "
        "download. They have been ignored, or old ones used instead.\n"
    )
    answers = iter([text, "Hit:1 http://127.0.0.1:9 ./ InRelease\n"])
    monkeypatch.setattr(packages, "run", lambda argv, *_, **__: CommandResult(argv, 0, next(answers), ""))
    manager = packages.Apt()
    manager.refresh()
    assert "http://127.0.0.1:9/./InRelease" in manager.unread
    with pytest.raises(
        MachineProblem, match=r"no kubelet; no version is available, because a source could not be read.*111"
    ):
        packages.choose(packages.RequestedPackage("kubelet"), [], manager.unread)
    manager.refresh()
    assert manager.unread == ""


@pytest.mark.parametrize(("complete", "fixed"), [(True, False), (False, True)])
def test_a_package_that_fails_again_is_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch, complete: bool, fixed: bool
) -> None:
    """A driver whose module does not build fails at each configuration, until another one replaces it."""
    calls: list[list[str]] = []

    def run(argv: list[str], *_: object, **__: object) -> CommandResult:
        calls.append(list(argv))
        if "--audit" in argv:
            return CommandResult(argv, 0, "The following packages are only half configured", "")
        if "check" in argv:
            return CommandResult(argv, 0 if complete else 100, "", "")
        return CommandResult(argv, 1 if "--configure" in argv else 0, "", "dpkg: error processing package nvidia")

    monkeypatch.setattr(packages, "run", run)
    assert packages.Apt().finish_interrupted()
    assert any("--configure" in call for call in calls)
    assert any("--fix-broken" in call for call in calls) is fixed


@pytest.mark.parametrize("manager", [packages.Apt(), packages.Dnf()])
def test_only_a_package_that_is_missing_from_a_source_is_fetched_again(
    manager: packages.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = (
        "E: Failed to fetch http://m/pool/s.deb  404  Not Found [IP: 127.0.0.1 80]\nE: Unable to fetch some archives\n"
    )
    answers = iter([missing, "E: Sub-process /usr/bin/dpkg returned an error code (1)\n"])
    monkeypatch.setattr(packages, "run", lambda argv, *_, **__: CommandResult(argv, 100, "", next(answers)))
    with pytest.raises(packages.NotFetched) as caught:
        manager.install({"kubelet": "1"})
    assert caught.value.output == missing
    with pytest.raises(MachineProblem) as other:
        manager.install({"kubelet": "1"})
    assert not isinstance(other.value, packages.NotFetched)


# What dpkg 1.22 and apt 3.0 do where a disk was full: kubelet was unpacked, and the package that it depends on was not.
UNCONFIGURED = """\
dpkg: dependency problems prevent configuration of kubelet:
 kubelet depends on kubernetes-cni (>= 1.2.0); however:
  Package kubernetes-cni is not installed.

dpkg: error processing package kubelet (--configure):
 dependency problems - leaving unconfigured
Errors were encountered while processing:
 kubelet
"""


@pytest.mark.parametrize("works", [True, False])
def test_an_installation_that_lacks_a_dependency_is_finished(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """dpkg cannot configure what it unpacked; apt installs what is missing, and configures both."""
    ran: list[str] = []

    def run(argv: Sequence[str], *_: object, **__: object) -> CommandResult:
        known = [each for each in argv if each in {"--audit", "--configure", "check", "--fix-broken"}]
        ran.append(" ".join([argv[0], *known]))
        if "--audit" in argv:
            return CommandResult(tuple(argv), 0, " kubelet              Node agent\n", "")
        if "--configure" in argv:
            return CommandResult(tuple(argv), 1, "", UNCONFIGURED)
        if "check" in argv:
            return CommandResult(tuple(argv), 100, "", "E: Unmet dependencies.")
        return CommandResult(tuple(argv), 0 if works else 100, "", "" if works else "E: Unmet dependencies.")

    monkeypatch.setattr(packages, "run", run)
    if works:
        assert packages.Apt().finish_interrupted()
    else:
        with pytest.raises(MachineProblem, match=r"apt-get install --fix-broken failed: .*Unmet dependencies"):
            packages.Apt().finish_interrupted()
    assert ran == ["dpkg --audit", "dpkg --configure", "apt-get check", "apt-get --fix-broken"]


def test_dnf_transaction() -> None:
    listing = (
        "Installing:\n kubelet  x86_64  1.36.3-150500.1.1  gpunodes-kubernetes  12 M\n"
        "Removing:\n runc  x86_64  1.1  @appstream  1 M\nTransaction Summary:\n"
    )
    assert packages.parse_dnf_transaction(listing) == packages.Effects(["kubelet"], ["runc"], [])
