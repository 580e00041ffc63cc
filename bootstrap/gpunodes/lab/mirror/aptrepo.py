"""Signed apt repositories: Packages, Release and InRelease."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from gpunodes.lab.mirror import store
from gpunodes.lab.mirror.programs import run
from gpunodes.lab.mirror.tree import MTIME

KEY_OWNER = "gpunodes lab mirror"


@dataclass(frozen=True)
class SigningKey:
    """The lab's own key; it signs only the mirror on this machine."""

    home: Path
    fingerprint: str
    armoured: str


def signing_key(cache: Path) -> SigningKey:
    """The key in ``cache``/gnupg, created on first use."""

    def make(folder: Path) -> None:
        folder.chmod(0o700)
        _gpg(folder, "--quick-generate-key", KEY_OWNER, "ed25519", "sign", "never")

    home = store.keep(cache / "gnupg", make)
    home.chmod(0o700)
    listing = _gpg(home, "--with-colons", "--list-keys", KEY_OWNER)
    fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
    return SigningKey(home, fingerprint, _gpg(home, "--armor", "--export", fingerprint))


def _gpg(home: Path, *arguments: str | Path) -> str:
    """Run gpg with the keys in ``home``, and end its agent."""
    # No passphrase: only the owner can read the key's folder, and nothing outside this lab trusts the key.
    unattended = ("--batch", "--no-tty", "--pinentry-mode", "loopback", "--passphrase", "")
    # The path of the agent's socket, in its home, is limited to 107 characters; the cache's path may be longer.
    with tempfile.TemporaryDirectory(prefix="gpg-") as folder:
        link = Path(folder, "home")
        link.symlink_to(home.absolute())
        try:
            return run(["gpg", "--homedir", link, *unattended, *arguments])
        finally:
            run(["gpgconf", "--homedir", link, "--kill", "all"])


def stanza(control: str, filename: str, data_size: int, sha256: str) -> str:
    """One entry of a Packages file: the package's control text, and path, size and checksum of its file."""
    return f"{control.strip()}\nFilename: {filename}\nSize: {data_size}\nSHA256: {sha256}\n"


def packages_index(root: Path, files: Sequence[Path]) -> str:
    """The Packages text for ``files``; file names are relative to ``root``."""
    stanzas = []
    for file in sorted(files):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        control = run(["dpkg-deb", "--field", file])
        stanzas.append(stanza(control, str(file.relative_to(root)), file.stat().st_size, digest))
    return "\n".join(stanzas)


def release(fields: Mapping[str, str], indexes: Mapping[str, bytes]) -> str:
    """The Release text: its fields, a fixed date, and size and checksum of every index."""
    lines = [f"{key}: {value}" for key, value in fields.items()]
    lines += [f"Date: {formatdate(MTIME, usegmt=True)}", "SHA256:"]
    lines += [f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in sorted(indexes.items())]
    return "\n".join(lines) + "\n"


def publish(folder: Path, fields: Mapping[str, str], indexes: Mapping[str, bytes], key: SigningKey) -> None:
    """Write ``indexes``, Release, InRelease and Release.gpg below ``folder``."""
    for name, data in indexes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    text = folder / "Release"
    text.write_text(release(fields, indexes))
    signer = ("--yes", "--local-user", key.fingerprint, "--digest-algo", "SHA512")
    _gpg(key.home, *signer, "--output", folder / "InRelease", "--clearsign", text)
    _gpg(key.home, *signer, "--armor", "--output", folder / "Release.gpg", "--detach-sign", text)
