"""The file of a backup: what is written is read again, and nothing else is."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.errors import WrongInput
from gpunodes.operations.etcd import archive

ABOUT = {
    "ca_hash": f"sha256:{'0' * 64}",
    "endpoint": "10.0.0.1:6443",
    "hostname": "control-1",
    "time": 1_790_000_000.0,
    "kubernetes": "v1.36.3",
    "paths": {"kubernetes/encryption-configuration": "/etc/kubernetes/gpunodes/encryption.json"},
    "etcd": {
        "version": "3.6.8",
        "revision": 7,
        "hash": 1,
        "keys": 3,
        "db_size": 20480,
        "members": [{"id": "8e9e05c52164694d", "name": "control-1", "learner": False}],
    },
}


def snapshot(size: int = 300 << 10) -> bytes:
    """A file with etcd's own checksum at its end."""
    data = bytes(range(256)) * (size // 256)
    return data + hashlib.sha256(data).digest()


def made(parts: dict[str, bytes] | None = None, about: Any = ABOUT) -> bytes:
    out = io.BytesIO()
    writer = archive.Writer(out)
    for name, data in (parts or {archive.SNAPSHOT: snapshot(), "pki/ca.crt": b"pem"}).items():
        writer.part(name, len(data), io.BytesIO(data).read)
    writer.end("control-1", about, "0.1.0")
    return out.getvalue()


def check(data: bytes) -> archive.Backup:
    return archive.check(io.BytesIO(data), "b.tar")


def rebuilt(change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> bytes:
    """A backup whose members were changed in any way, packed again."""
    with tarfile.open(fileobj=io.BytesIO(made())) as tar:
        members = [(each, (tar.extractfile(each) or io.BytesIO()).read()) for each in tar]
    change(members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def added(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"x", link: str = "") -> bytes:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname = kind, len(data) if kind == tarfile.REGTYPE else 0, link
        members.insert(0, (info, data if kind == tarfile.REGTYPE else b""))

    return rebuilt(change)


def manifest(change: Callable[[dict[str, Any]], None]) -> bytes:
    def replace(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info, text = members.pop()
        document = json.loads(text)
        change(document)
        data = json.dumps(document).encode()
        info.size = len(data)
        members.append((info, data))

    return rebuilt(replace)


def test_what_is_written_is_read_again() -> None:
    pieces: list[bytes] = []
    found = archive.check(io.BytesIO(made()), "b.tar", pieces.append)
    assert found.machine == "control-1"
    assert found.about == ABOUT
    assert b"".join(pieces) == snapshot()
    assert found.snapshot.sha256 == hashlib.sha256(snapshot()).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(made())) as tar:
        assert {each.mode for each in tar} == {0o600}
        assert tar.getnames()[-1] == archive.MANIFEST


def test_nothing_of_a_snapshot_is_held_in_memory() -> None:
    """The writer asks for pieces, and the reader gives pieces."""
    asked: list[int] = []

    class Sink(io.BytesIO):
        def write(self, data: Any) -> int:
            asked.append(len(data))
            return len(data)

    archive.Writer(Sink()).part(archive.SNAPSHOT, 64 << 20, lambda most: b"\0" * min(most, 1 << 16))
    assert max(asked) <= 1 << 20


HOSTILE = {
    "a path outside": added("../../etc/passwd"),
    "an absolute path": added("/etc/passwd"),
    "a known name in another spelling": added("./pki/ca.crt"),
    "a symbolic link": added("pki/ca.key", tarfile.SYMTYPE, link="/etc/shadow"),
    "a hard link": added("pki/ca.key", tarfile.LNKTYPE, link="pki/ca.crt"),
    "a device": added("pki/ca.key", tarfile.CHRTYPE),
    "a pipe": added("pki/ca.key", tarfile.FIFOTYPE),
    "a folder": added("pki", tarfile.DIRTYPE),
    "a part twice": added("pki/ca.crt"),
    "a large key": added("pki/ca.key", data=b"x" * (archive.SMALL + 1)),
    "an empty key": added("pki/ca.key", data=b""),
    "a part that the manifest does not list": added("pki/ca.key"),
    "another snapshot": rebuilt(
        lambda all_: all_.__setitem__(0, (all_[0][0], snapshot()[:-33] + snapshot()[-33:][::-1]))
    ),
    "something behind the manifest": rebuilt(lambda all_: all_.append(all_.pop(0))),
    "no manifest": rebuilt(lambda all_: all_.__delitem__(-1)),
    "no snapshot": rebuilt(lambda all_: all_.__delitem__(0)),
    "a hash of another part": manifest(lambda found: found["parts"][1].update(sha256="0" * 64)),
    "another size": manifest(lambda found: found["parts"][1].update(size=4)),
    "a part listed twice": manifest(lambda found: found["parts"].append(found["parts"][1])),
    "an unknown version": manifest(lambda found: found.update(schema="gpunodes.etcd-backup/9")),
    "a name with a line break": manifest(lambda found: found.update(machine="a\nb")),
    "a number of another kind": manifest(lambda found: found["about"]["etcd"].update(revision="7")),
    "half a file": made()[: len(made()) // 2],
    "a cut end": made()[:-10240],
    "data behind its end": made() + b"more",
    "an empty file": b"",
    "text": b"hello " * 1000,
    "a compressed file": gzip.compress(made()),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(WrongInput) as refused:
        check(data)
    assert "is not a usable backup" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_header_that_claims_a_huge_size_is_refused_before_it_is_read() -> None:
    info = tarfile.TarInfo(archive.SNAPSHOT)
    info.size = 1 << 60
    with pytest.raises(WrongInput, match="has 1152921504606846976 bytes"):
        check(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)


def test_a_snapshot_that_etcd_did_not_end_is_refused() -> None:
    """The manifest is right, but the snapshot was already damaged when it was packed."""
    with pytest.raises(WrongInput, match="checksum that etcd gave it"):
        check(made({archive.SNAPSHOT: snapshot()[:-1] + b"!"}))


@pytest.mark.parametrize(
    "parts",
    [
        None,
        [],
        [{"name": "pki/ca.crt", "size": 1}],
        [{"name": archive.SNAPSHOT, "size": 1 << 50}],
        [{"name": archive.SNAPSHOT, "size": -1}],
        [{"name": archive.SNAPSHOT, "size": 1}] * 2,
        [{"name": archive.SNAPSHOT, "size": 1}, {"name": "../x", "size": 1}],
    ],
)
def test_a_machine_cannot_name_parts(parts: Any) -> None:
    assert archive.parts_problem(parts)
