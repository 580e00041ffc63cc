"""The key of a package source: of all keys in a file only the pinned one reaches a machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils.gpunodes import host, ledger, openpgp, packages
from gpunodes.ansible.module_utils.gpunodes.problem import MachineProblem

FIXTURES = Path(__file__).with_name("fixtures") / "openpgp"
"""Made with gpg: a key with a signing subkey, another key, and signatures of ``Release\\n`` by each of the three."""
SOURCE, OTHER = ((FIXTURES / f"{name}.asc").read_text() for name in ("source", "other"))
PINNED, STRANGE = (openpgp.fingerprints(text)[0] for text in (SOURCE, OTHER))


def repository(key: str = "https://packages.example/key.asc", fingerprint: str = PINNED) -> host.Repository:
    return host.Repository("kubernetes", "https://packages.example/", key, fingerprint)


def packets_of(text: str) -> list[tuple[int, bytes]]:
    return list(openpgp._packets(openpgp._dearmour(text)))


def armoured(found: list[tuple[int, bytes]]) -> str:
    """In the new format, which has room for every tag."""
    return openpgp._armour(
        b"".join(bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body for tag, body in found)
    )


def one_block(*texts: str) -> str:
    return armoured([packet for text in texts for packet in packets_of(text)])


TOGETHER = {
    "after it": SOURCE + OTHER,
    "before it": OTHER + SOURCE,
    "in one block": one_block(SOURCE, OTHER),
    "around it": one_block(OTHER, SOURCE, OTHER),
    "twice": SOURCE + OTHER + SOURCE,
    "as a secret key": armoured(
        [*packets_of(SOURCE), *((5 if tag == 6 else tag, body) for tag, body in packets_of(OTHER))]
    ),
    "in a packet that nobody knows": armoured([*packets_of(SOURCE), (60, openpgp._dearmour(OTHER))]),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a machine has the key of the source."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(packages, "detect", packages.Apt)
    monkeypatch.setattr(host, "repository_paths", lambda *_: (str(tmp_path / "key.asc"), str(tmp_path / "source")))
    return tmp_path / "key.asc"


def converge(**message: str) -> list[str]:
    """What a run changes on this machine."""
    return host.Converger(host.Spec(repositories=(repository(**message),))).run().actions


@pytest.mark.parametrize("file", TOGETHER.values(), ids=TOGETHER.keys())
def test_of_several_keys_only_the_pinned_one_is_installed(
    file: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A man in the middle appends his own key to the source's: apt and rpm would trust both."""
    monkeypatch.setattr(host, "fetch", lambda _: file)
    assert f"write {place}" in converge()
    assert openpgp.fingerprints(place.read_text()) == [PINNED]
    assert place.read_text() == SOURCE
    assert converge() == []
    assert converge(key=file) == []


def test_a_machine_that_has_both_keys_loses_the_second(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is fetched for it."""
    monkeypatch.setattr(host, "fetch", lambda _: pytest.fail("fetched"))
    place.write_text(SOURCE + OTHER)
    assert f"write {place}" in converge()
    assert place.read_text() == SOURCE
    assert converge() == []


KEY, NAME, NAMED, *SUBKEYS = packets_of(SOURCE)
CUT = {
    "the key alone": [KEY],
    "no signature": [KEY, NAME],
    "the signature of a subkey only": [KEY, NAME, *SUBKEYS],
    "no user id": [KEY, NAMED, *SUBKEYS],
    "of another key": [KEY, *packets_of(OTHER)],
}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT.keys())
def test_what_somebody_left_of_the_pinned_key_is_none(
    cut: list[tuple[int, bytes]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, and fetched again where it is on a machine already."""
    with pytest.raises(MachineProblem, match="has no signed user id"):
        host.checked_key(armoured(cut), repository())
    place.write_text(armoured(cut))
    monkeypatch.setattr(host, "fetch", lambda _: SOURCE)
    assert f"write {place}" in converge()
    assert place.read_text() == SOURCE


class Source(packages.Apt):
    """A package manager with one source, which signs by a subkey: gpgv judges that by the key on the machine.

    ``known``: it was read before, so that apt warns only and keeps what it has. ``late``: as dnf, it asks for the key
    when a package is installed.
    """

    def __init__(self, place: Path, *, known: bool, late: bool) -> None:
        self.place, self.known, self.late = place, known, late
        self.read = late
        self.calls: list[str] = []

    def _trusted(self) -> bool:
        return good(self.place.parent, self.place.read_text(), "by-subkey")

    def installed(self, names: Sequence[str]) -> Mapping[str, packages.PackageState]:
        return {}

    def mend(self) -> bool:
        return False

    def refresh(self, files: Sequence[str] = ()) -> None:
        self.calls.append("refresh")
        self.read = self.late or self._trusted()
        if not self.read and not self.known:
            raise MachineProblem("apt-get update failed: E: The repository 'https://x InRelease' is not signed.")

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {name: ["1.36.3-1.1"] if self.read else ["1.36.2-1.1"] for name in names}

    def effects(self, packages_: Mapping[str, str]) -> packages.Effects:
        return packages.Effects(list(packages_), [], [])

    def install(self, packages_: Mapping[str, str]) -> None:
        self.calls.append("install")
        if not self._trusted():
            raise MachineProblem("Error: GPG check FAILED")


needs_gpgv = pytest.mark.skipif(not shutil.which("gpgv"), reason="needs gpgv (make setup installs it)")


@needs_gpgv
@pytest.mark.parametrize(("known", "late"), [(False, False), (True, False), (False, True)])
def test_a_key_that_does_not_fit_its_source_is_fetched_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, known: bool, late: bool
) -> None:
    """Somebody on the way cut its subkey off, once; or its owner has another since."""
    source = Source(place, known=known, late=late)
    monkeypatch.setattr(packages, "detect", lambda: source)
    place.write_text(openpgp.only(armoured([KEY, NAME, NAMED]), PINNED))
    wanted = host.Spec(repositories=(repository(),), packages=(packages.RequestedPackage("kubelet", "1.36.3*"),))

    def fetch(_: str) -> str:
        source.calls.append("fetch")
        return SOURCE

    monkeypatch.setattr(host, "fetch", fetch)
    assert "install kubelet 1.36.3-1.1" in host.Converger(wanted).run().actions
    assert place.read_text() == SOURCE
    assert source.calls.count("fetch") == 1
    assert source.calls[-1] == "install"


@needs_gpgv
@pytest.mark.parametrize("answer", [openpgp.only(armoured([KEY, NAME, NAMED]), PINNED), OTHER, "no key"])
def test_a_source_that_nobody_signs_is_asked_for_its_key_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """What comes is refused or the same as before: the first cause is said, and the key stays."""
    source = Source(place, known=False, late=False)
    monkeypatch.setattr(packages, "detect", lambda: source)
    before = openpgp.only(armoured([KEY, NAME, NAMED]), PINNED)
    place.write_text(before)
    monkeypatch.setattr(host, "fetch", lambda _: answer)
    wanted = host.Spec(repositories=(repository(),), packages=(packages.RequestedPackage("kubelet", "1.36.3*"),))
    with pytest.raises(MachineProblem, match="is not signed"):
        host.Converger(wanted).run()
    assert place.read_text() == before


@pytest.mark.parametrize("fingerprint", [STRANGE, PINNED[-16:], " ", "0" * 40])
def test_a_file_without_the_pinned_key_is_refused(fingerprint: str) -> None:
    with pytest.raises(MachineProblem, match=PINNED):
        host.checked_key(SOURCE, repository(fingerprint=fingerprint))


def test_a_user_s_picture_and_what_signs_it_are_left_out() -> None:
    key, name, signature, *rest = packets_of(SOURCE)
    file = armoured([key, name, signature, (17, b"picture"), signature, *rest])
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
def test_a_file_that_ends_in_the_middle_is_no_key(data: bytes) -> None:
    assert openpgp.fingerprints(openpgp._armour(data)) == []
    assert openpgp.only(openpgp._armour(data), PINNED) == ""


@pytest.mark.parametrize(("version", "size"), [(b"\5", 64), (b"\6", 64)])
def test_newer_keys_have_fingerprints_too(version: bytes, size: int) -> None:
    """RFC 9580's own sample key, appendix A.3."""
    body = bytes.fromhex("63877fe31b00000020f94da7bb48d60a61e567706a6587d0331999bb9d891a08242ead84543df895a3")
    (found,) = openpgp.fingerprints(armoured([(6, version + body)]))
    assert len(found) == size
    if version == b"\6":
        assert found == "CB186C4F0609A697E4D52DFA6C722B0C1F1E27C18A56708F6525EC27BAD9ACC9"


def good(tmp_path: Path, key: str, signature: str) -> bool:
    """What gpgv, by which apt decides, says of a signature where this key file is trusted."""
    (tmp_path / "keyring.gpg").write_bytes(openpgp._dearmour(key))
    (tmp_path / "Release").write_text("Release\n")
    words = ["gpgv", "--keyring", "./keyring.gpg", str(FIXTURES / f"{signature}.sig"), "Release"]
    return subprocess.run(words, cwd=tmp_path, capture_output=True, check=False).returncode == 0


@needs_gpgv
def test_gpgv_takes_the_source_s_signatures_and_no_other(tmp_path: Path) -> None:
    assert good(tmp_path, SOURCE + OTHER, "by-other"), "the trial shows nothing"
    written = host.checked_key(SOURCE + OTHER, repository())
    assert {name: good(tmp_path, written, name) for name in ("by-source", "by-subkey", "by-other")} == {
        "by-source": True,
        "by-subkey": True,
        "by-other": False,
    }


@needs_gpgv
@pytest.mark.parametrize("bound", [False, True], ids=["without a signature", "with the signature of a real subkey"])
def test_gpgv_takes_no_subkey_that_the_source_has_not_signed(tmp_path: Path, bound: bool) -> None:
    """What somebody appends to the pinned key itself gets there, and is worth nothing."""
    added = [(14, packets_of(OTHER)[0][1])] + ([packets_of(SOURCE)[-1]] if bound else [])
    written = host.checked_key(armoured([*packets_of(SOURCE), *added]), repository())
    assert len(packets_of(written)) > len(packets_of(SOURCE))
    assert good(tmp_path, written, "by-subkey")
    assert not good(tmp_path, written, "by-other")
