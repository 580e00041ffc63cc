"""The image of gpunodes: what becomes of packages in it, and the archive, without a download."""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from gpunodes.lab.mirror import deb, oci, programs
from gpunodes.lab.mirror.tree import TreeEntry

pytestmark = pytest.mark.skipif(bool(programs.missing_packages()), reason="needs the programs of a build")

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "bootstrap" / "image.py"))
PACKAGES = {
    "ca-certificates": [TreeEntry("/usr/share/ca-certificates/mozilla/One.crt", b"-----BEGIN CERTIFICATE-----\n")],
    "openssh-client": [
        TreeEntry("/usr/bin/ssh", b"program", 0o755),
        TreeEntry("/usr/lib/openssh/ssh-keysign", b"program", 0o4755),
        TreeEntry("/usr/share/doc/openssh-client/copyright", b"BSD"),
        TreeEntry("/usr/share/man/man1/ssh.1", b"page"),
        TreeEntry("/etc/init.d/sshd", b"#!/bin/sh\n", 0o755),
    ],
    "passwd": [TreeEntry("/usr/bin/chsh", b"program", 0o4755)],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of an image of these packages."""
    archives = []
    for name, entries in PACKAGES.items():
        package = deb.DebPackage(name, "1.0", "amd64", "Example <maintainer@example.org>", "Example")
        archives.append(tmp_path / package.file_name)
        deb.write(package, entries, archives[-1])
    folder = tmp_path / "tree"
    SCRIPT["lay_out"](SCRIPT["system"](archives), folder)
    return folder


def archived(tree: Path, target: Path) -> tuple[str, dict[str, bytes]]:
    """The digest of an image with one layer, and the files of its archive."""
    blobs = oci.Blobs(target / "blobs")
    layer = blobs.layer(list(SCRIPT["collected"](tree)))
    labels = {"dev.gpunodes.kubectl": "none"}
    image = oci.OciImage("example.org/some", ("1.0",), (layer,), ("run",), "65532:65532", ("HOME=/tmp",), labels)
    digest = oci.write_archive(target / "image.tar", image, blobs, "amd64")
    with tarfile.open(target / "image.tar") as tar:
        members = {each.name: tar.extractfile(each) for each in tar if each.isfile()}
        return digest, {name: stream.read() for name, stream in members.items() if stream}


def test_the_image_has_programs_and_licences_only(tree: Path) -> None:
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and not path.is_symlink()}
    assert {"usr/bin/ssh", "usr/share/doc/openssh-client/copyright", "var/lib/dpkg/status.d/openssh-client"} <= files
    assert not {"usr/share/man/man1/ssh.1", "etc/init.d/sshd", "usr/bin/chsh"} & files
    assert (tree / "etc/ssl/certs/ca-certificates.crt").read_bytes().startswith(b"-----BEGIN CERTIFICATE")
    assert "gpunodes:x:65532:65532:" in (tree / "etc/passwd").read_text()


def test_no_file_gives_rights(tree: Path) -> None:
    """Neither setuid nor writable by others, whatever the modes of the packages and of the building machine are."""
    (tree / "usr/bin/ssh").chmod(0o777)
    (tree / "etc").chmod(0o777)
    entries = {entry.path: entry for entry in SCRIPT["collected"](tree)}
    assert entries["/usr/bin/ssh"].mode == entries["/usr/lib/openssh/ssh-keysign"].mode == entries["/etc"].mode == 0o755
    assert [path for path, entry in entries.items() if entry.link is None and entry.mode & 0o7022] == ["/tmp"]
    assert entries["/tmp"].mode == 0o1777


def test_the_archive_is_an_image_layout(tree: Path, tmp_path: Path) -> None:
    digest, files = archived(tree, tmp_path)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    [entry] = json.loads(files["index.json"])["manifests"]
    assert entry["digest"] == digest
    # The names that containerd and Docker give the image.
    assert entry["annotations"]["io.containerd.image.name"] == "example.org/some:1.0"
    assert json.loads(files["manifest.json"])[0]["RepoTags"] == ["example.org/some:1.0"]
    for name, data in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"

    def blob(descriptor: dict[str, Any]) -> bytes:
        data = files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert len(data) == descriptor["size"]
        return data

    manifest = json.loads(blob(entry))
    config = json.loads(blob(manifest["config"]))
    assert (config["config"]["User"], config["config"]["Entrypoint"]) == ("65532:65532", ["run"])
    assert "HOME=/tmp" in config["config"]["Env"]
    assert config["config"]["Labels"] == {"dev.gpunodes.kubectl": "none"}
    [layer] = manifest["layers"]
    plain = subprocess.run(["zstd", "-dc"], input=blob(layer), check=True, capture_output=True).stdout
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        assert {(member.uid, member.gid) for member in tar} == {(0, 0)}
        assert "usr/bin/ssh" in tar.getnames()
    assert str(tmp_path).encode() not in plain


def test_equal_trees_make_equal_archives(tree: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        archived(tree, tmp_path / name)
        (tree / "usr/bin/ssh").touch()
    assert (tmp_path / "one/image.tar").read_bytes() == (tmp_path / "two/image.tar").read_bytes()
