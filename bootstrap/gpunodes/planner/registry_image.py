"""A small image that a node can run, made from nothing: its only program ends with 0 at once. Pure.

Each one has other content, so that no node has it before it pulls it. Sources: OCI image-spec, "manifest.md",
"config.md" and "layer.md"; ELF-64 (System V ABI); numbers of the system call exit: Linux, arch/x86/entry/syscalls and
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from dataclasses import dataclass

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
# By the architecture as nodes report it: its number in ELF, and the instructions of exit(0).
_PROGRAMS = {
    # mov eax, 60; xor edi, edi; syscall
    "amd64": (62, bytes.fromhex("b83c000000 31ff 0f05")),
    # mov x0, 0; mov x8, 93; svc 0
    "arm64": (183, bytes.fromhex("000080d2 a80b80d2 010000d4")),
}
ARCHITECTURES = tuple(_PROGRAMS)
_AT = 0x400000
_HEADERS = 64 + 56


@dataclass(frozen=True, slots=True)
class Image:
    """An image: its manifest, and the blobs that this names."""

    manifest: bytes
    blobs: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        return digest(self.manifest)


def digest(content: bytes) -> str:
    """The digest by which registries name a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def made(architecture: str, nonce: str) -> Image:
    """An image for one of ``ARCHITECTURES``; with another ``nonce`` it is another one."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as layer:
        for name, content, mode in (("run", _program(architecture), 0o755), ("nonce", nonce.encode(), 0o644)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            layer.addfile(entry, io.BytesIO(content))
    packed = gzip.compress(archive.getvalue(), mtime=0)
    config = _dump(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Entrypoint": ["/run"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(archive.getvalue())]},
        }
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _descriptor(_CONFIG, config),
        "layers": [_descriptor(_LAYER, packed)],
    }
    return Image(_dump(manifest), (config, packed))


def _program(architecture: str) -> bytes:
    """A static program: one segment, which is read and run from its beginning."""
    machine, code = _PROGRAMS[architecture]
    size = _HEADERS + len(code)
    identification = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    # The header, then the program header. 64 KiB: the largest page of arm64.
    header = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, _AT + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _AT, _AT, size, size, 0x10000)
    return identification + header + segment + code


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest(content), "size": len(content)}


def _dump(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
