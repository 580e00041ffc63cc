"""OpenPGP keys of package sources: only the pinned key of a file is installed on a machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import ledger, openpgp, packages
from gpunodes.ansible.module_utils.host import keys, sources
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.ansible.module_utils.host.spec import Repository, Spec
from gpunodes.ansible.module_utils.problem import MachineProblem

FIXTURES = Path(__file__).parents[1] / "fixtures" / "openpgp"
"""Made with gpg: a key with a signing subkey, another key, and a signature of ``Release\\n`` by each of the three."""
SOURCE, OTHER = ((FIXTURES / f"{name}.asc").read_text() for name in ("source", "other"))
PINNED, UNRELATED = (openpgp.fingerprints(text)[0] for text in (SOURCE, OTHER))
# Made for this test with Ed25519; nothing is signed by it.
ED25519_KEY = """-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEawGT8hYJKwYBBAHaRw8BAQdAnehdWTWYShR7GtZub5cqYDt5kvYOp2RkQ4KH
+LatUKq0E2dwdW5vZGVzIGxhYiBtaXJyb3KIkAQTFggAOBYhBINrGt4kdwI+/wTJ
PNW+LQWxg07jBQJrAZPyAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJENW+
LQWxg07j0Y0BAI+OJxdEOtoYJPHMX1HXXUIwzwV/lXMPLqhqTztKiaH3AQDGyrB8
E8kTDqhKytdsO+MRgpsCT66IGV5lTUJsLkGJCQ==
=9n4c
-----END PGP PUBLIC KEY BLOCK-----
"""
ED25519_FINGERPRINT = "836B1ADE2477023EFF04C93CD5BE2D05B1834EE3"


def repository(key: str = "https://packages.example/key.asc", fingerprint: str = PINNED) -> Repository:
    return Repository("kubernetes", "https://packages.example/", key, fingerprint)


def packets_of(text: str) -> list[tuple[int, bytes]]:
    return list(openpgp._packets(openpgp._dearmour(text)))


def armoured(found: list[tuple[int, bytes]]) -> str:
    """A key file in the new packet format, which supports every tag."""
    return openpgp._armour(
        b"".join(bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body for tag, body in found)
    )


def one_block(*texts: str) -> str:
    return armoured([packet for text in texts for packet in packets_of(text)])


COMBINED = {
    "after it": SOURCE + OTHER,
    "before it": OTHER + SOURCE,
    "in one block": one_block(SOURCE, OTHER),
    "around it": one_block(OTHER, SOURCE, OTHER),
    "twice": SOURCE + OTHER + SOURCE,
    "as a secret key": armoured(
        [*packets_of(SOURCE), *((5 if tag == 6 else tag, body) for tag, body in packets_of(OTHER))]
    ),
    "in an unknown packet": armoured([*packets_of(SOURCE), (60, openpgp._dearmour(OTHER))]),
}


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the source's key on a machine."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(packages, "detect", packages.Apt)
    monkeypatch.setattr(sources, "paths", lambda *_: (str(tmp_path / "key.asc"), str(tmp_path / "source")))
    return tmp_path / "key.asc"


def actions(**settings: str) -> list[str]:
    """The actions of a run on this machine."""
    return converge(Spec(repositories=(repository(**settings),))).actions


@pytest.mark.parametrize("file", COMBINED.values(), ids=COMBINED.keys())
def test_only_the_pinned_key_is_installed(file: str, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker on the network appends another key to the source's key: apt and rpm would trust both."""
    monkeypatch.setattr(keys, "fetch", lambda *_: file)
    assert f"write {key_file}" in actions()
    assert openpgp.fingerprints(key_file.read_text()) == [PINNED]
    assert key_file.read_text() == SOURCE
    assert actions() == []
    assert actions(key=file) == []


def test_unpinned_key_is_removed_from_a_machine(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched for that."""
    monkeypatch.setattr(keys, "fetch", lambda *_: pytest.fail("fetched"))
    key_file.write_text(SOURCE + OTHER)
    assert f"write {key_file}" in actions()
    assert key_file.read_text() == SOURCE
    assert actions() == []


KEY, USER_ID, SIGNATURE, *SUBKEYS = packets_of(SOURCE)
INCOMPLETE = {
    "the key alone": [KEY],
    "no signature": [KEY, USER_ID],
    "only the signature of a subkey": [KEY, USER_ID, *SUBKEYS],
    "no user id": [KEY, SIGNATURE, *SUBKEYS],
    "user id of another key": [KEY, *packets_of(OTHER)],
}


@pytest.mark.parametrize("packets", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_incomplete_pinned_key_is_refused(
    packets: list[tuple[int, bytes]], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a machine already has an incomplete key, the key is fetched again."""
    with pytest.raises(MachineProblem, match="has no signed user id"):
        keys.checked_key(armoured(packets), repository())
    key_file.write_text(armoured(packets))
    monkeypatch.setattr(keys, "fetch", lambda *_: SOURCE)
    assert f"write {key_file}" in actions()
    assert key_file.read_text() == SOURCE


class Source(packages.Apt):
    """A package manager with one source that signs with a subkey: gpgv verifies that with the key on the machine.

    ``known``: apt has read the source before, so it only warns and keeps its old lists. ``late``: like dnf, it verifies
    the key only when a package is installed.
    """

    def __init__(self, key_file: Path, *, known: bool, late: bool) -> None:
        self.key_file, self.known, self.late = key_file, known, late
        self.read = late
        self.calls: list[str] = []

    unread = ""

    def _trusted(self) -> bool:
        return accepts(self.key_file.parent, self.key_file.read_text(), "by-subkey")

    def installed(self, names: Sequence[str]) -> Mapping[str, packages.PackageState]:
        return {}

    def finish_interrupted(self) -> bool:
        return False

    def refresh(self, files: Sequence[str] = ()) -> None:
        self.calls.append("refresh")
        self.read = self.late or self._trusted()
        if not self.read and not self.known:
            raise MachineProblem("apt-get update failed: E: The repository 'https://x InRelease' is not signed.")

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {name: ["1.36.3-1.1"] if self.read else ["1.36.2-1.1"] for name in names}

    def effects(self, packages_: Mapping[str, str], *, replace: bool = False) -> packages.Effects:
        return packages.Effects(list(packages_), [], [])

    def install(self, packages_: Mapping[str, str], *, replace: bool = False) -> None:
        self.calls.append("install")
        if not self._trusted():
            raise MachineProblem("Error: GPG check FAILED")


needs_gpgv = pytest.mark.skipif(not shutil.which("gpgv"), reason="needs gpgv (make setup installs it)")


@needs_gpgv
@pytest.mark.parametrize(("known", "late"), [(False, False), (True, False), (False, True)])
def test_key_that_does_not_verify_its_source_is_fetched_again(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, known: bool, late: bool
) -> None:
    """An attacker once removed its subkey, or the source has a new subkey."""
    source = Source(key_file, known=known, late=late)
    monkeypatch.setattr(packages, "detect", lambda: source)
    key_file.write_text(openpgp.only(armoured([KEY, USER_ID, SIGNATURE]), PINNED))
    spec = Spec(repositories=(repository(),), packages=(packages.RequestedPackage("kubelet", "1.36.3*"),))

    def fetch(*_: object) -> str:
        source.calls.append("fetch")
        return SOURCE

    monkeypatch.setattr(keys, "fetch", fetch)
    assert "install kubelet 1.36.3-1.1" in converge(spec).actions
    assert key_file.read_text() == SOURCE
    assert source.calls.count("fetch") == 1
    assert source.calls[-1] == "install"


@needs_gpgv
@pytest.mark.parametrize("fetched", [openpgp.only(armoured([KEY, USER_ID, SIGNATURE]), PINNED), OTHER, "no key"])
def test_key_of_an_unsigned_source_is_fetched_once(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, fetched: str
) -> None:
    """The fetched key is invalid or unchanged: the first error is reported, and the key on the machine stays."""
    source = Source(key_file, known=False, late=False)
    monkeypatch.setattr(packages, "detect", lambda: source)
    before = openpgp.only(armoured([KEY, USER_ID, SIGNATURE]), PINNED)
    key_file.write_text(before)
    monkeypatch.setattr(keys, "fetch", lambda *_: fetched)
    spec = Spec(repositories=(repository(),), packages=(packages.RequestedPackage("kubelet", "1.36.3*"),))
    with pytest.raises(MachineProblem, match="is not signed"):
        converge(spec)
    assert key_file.read_text() == before


@pytest.mark.parametrize("fingerprint", [UNRELATED, PINNED[-16:], " ", "0" * 40])
def test_file_without_the_pinned_key_is_refused(fingerprint: str) -> None:
    with pytest.raises(MachineProblem, match=PINNED):
        keys.checked_key(SOURCE, repository(fingerprint=fingerprint))


def test_picture_and_its_signatures_are_removed() -> None:
    file = armoured([KEY, USER_ID, SIGNATURE, (17, b"picture"), SIGNATURE, *SUBKEYS])
    assert openpgp.only(file, PINNED) == SOURCE


@pytest.mark.parametrize(
    "data",
    [
        b"\x99",
        b"\x99\x00\x33\x04",
        b"\xc6\xff\xff\xff\xff\xff",
        b"\xc6\xe1\x04\x00",
        openpgp._dearmour(SOURCE)[:-1],
        openpgp._dearmour(SOURCE) + b"\0",
    ],
)
def test_truncated_file_contains_no_key(data: bytes) -> None:
    assert openpgp.fingerprints(openpgp._armour(data)) == []
    assert openpgp.only(openpgp._armour(data), PINNED) == ""


@pytest.mark.parametrize(("version", "size"), [(b"\5", 64), (b"\6", 64)])
def test_fingerprints_of_newer_key_versions(version: bytes, size: int) -> None:
    """The sample key of RFC 9580, appendix A.3."""
    body = bytes.fromhex("63877fe31b00000020f94da7bb48d60a61e567706a6587d0331999bb9d891a08242ead84543df895a3")
    (found,) = openpgp.fingerprints(armoured([(6, version + body)]))
    assert len(found) == size
    if version == b"\6":
        assert found == "CB186C4F0609A697E4D52DFA6C722B0C1F1E27C18A56708F6525EC27BAD9ACC9"


def accepts(tmp_path: Path, key: str, signature: str) -> bool:
    """Whether gpgv, which apt uses, accepts a signature with this key file."""
    (tmp_path / "keyring.gpg").write_bytes(openpgp._dearmour(key))
    (tmp_path / "Release").write_text("Release\n")
    argv = ["gpgv", "--keyring", "./keyring.gpg", str(FIXTURES / f"{signature}.sig"), "Release"]
    return subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False).returncode == 0


@needs_gpgv
def test_gpgv_accepts_only_signatures_of_the_source(tmp_path: Path) -> None:
    assert accepts(tmp_path, SOURCE + OTHER, "by-other"), "the signature itself is invalid"
    checked = keys.checked_key(SOURCE + OTHER, repository())
    assert {name: accepts(tmp_path, checked, name) for name in ("by-source", "by-subkey", "by-other")} == {
        "by-source": True,
        "by-subkey": True,
        "by-other": False,
    }


@needs_gpgv
@pytest.mark.parametrize("bound", [False, True], ids=["without a signature", "with the signature of a real subkey"])
def test_gpgv_ignores_a_subkey_that_the_source_has_not_signed(tmp_path: Path, bound: bool) -> None:
    """A subkey that an attacker appends to the pinned key is installed, but has no effect."""
    added = [(14, packets_of(OTHER)[0][1])] + ([packets_of(SOURCE)[-1]] if bound else [])
    checked = keys.checked_key(armoured([*packets_of(SOURCE), *added]), repository())
    assert len(packets_of(checked)) > len(packets_of(SOURCE))
    assert accepts(tmp_path, checked, "by-subkey")
    assert not accepts(tmp_path, checked, "by-other")


def test_fingerprint() -> None:
    assert openpgp.fingerprints(ED25519_KEY) == [ED25519_FINGERPRINT]


def test_as_people_write_it() -> None:
    assert openpgp.plain("836b 1ADE 2477") == "836B1ADE2477"


@pytest.mark.parametrize("text", ["", "no key", ED25519_KEY[:80], ED25519_KEY.replace("mDME", "!!!!")])
def test_no_key(text: str) -> None:
    assert openpgp.fingerprints(text) == []


def test_a_wrong_key_is_refused() -> None:
    source = Repository("kubernetes", "http://m/", ED25519_KEY, fingerprint="00")
    with pytest.raises(MachineProblem, match=ED25519_FINGERPRINT):
        keys.checked_key(ED25519_KEY, source)
    with pytest.raises(MachineProblem, match="not an OpenPGP key"):
        keys.checked_key("<html>", source)
    with pytest.raises(MachineProblem, match="plain HTTP"):
        keys.checked_key(ED25519_KEY, Repository("kubernetes", "http://m/", "http://m/key"))
    keys.checked_key(
        ED25519_KEY, Repository("kubernetes", "http://m/", ED25519_KEY, fingerprint=ED25519_FINGERPRINT.lower())
    )
