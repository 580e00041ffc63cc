"""Which QEMU emulates the lab's machines."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpunodes.errors import GpunodesError
from gpunodes.lab import emulator


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's QEMU; no packages are downloaded."""
    own = tmp_path / "own"
    monkeypatch.setattr(emulator, "which", lambda _program: str(own) if own.exists() else None)

    def debootstrap(suite: str, tree: Path, packages: Sequence[str], *options: str) -> None:
        assert (suite, options) == ("trixie", ("--variant=extract",))
        assert "qemu-system-x86" in packages
        loader = tree / "usr/lib64/ld-linux-x86-64.so.2"
        loader.parent.mkdir(parents=True)
        loader.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        loader.chmod(0o755)

    monkeypatch.setattr(emulator, "debootstrap", debootstrap)
    return own


def write(own: Path, version: str) -> None:
    own.write_text(f"#!/bin/sh\necho 'QEMU emulator version {version}'\n")
    own.chmod(0o755)


def test_a_recent_qemu_of_the_host_is_used(host: Path, tmp_path: Path) -> None:
    write(host, "10.0.13 (Debian 1:10.0.13+ds-0+deb13u1)")
    assert emulator.program(tmp_path / "cache", print) == str(host)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", "9.2.1", "of unknown age"])
def test_an_older_one_is_replaced_once(host: Path, tmp_path: Path, version: str) -> None:
    write(host, version)
    told: list[str] = []
    first = emulator.program(tmp_path / "cache", told.append)
    assert emulator.program(tmp_path / "cache", told.append) == first
    assert len(told) == 1
    assert "trixie" in told[0]
    tree = Path(first).with_name("tree")
    started = subprocess.run([first, "-name", "a machine"], capture_output=True, text=True, check=True)
    arguments = started.stdout.splitlines()
    assert arguments[:3] == ["--library-path", f"{tree}/usr/lib/x86_64-linux-gnu", f"{tree}/usr/bin/qemu-system-x86_64"]
    assert arguments[-2:] == ["-name", "a machine"]


@pytest.mark.usefixtures("host")
def test_a_host_without_qemu_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(GpunodesError, match="QEMU is missing"):
        emulator.program(tmp_path / "cache", print)
