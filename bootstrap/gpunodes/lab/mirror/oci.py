"""Container images as the files of a registry (OCI image and distribution specifications)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes.lab.mirror.tree import TreeEntry, write_compressed_tar, write_tar

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"

CREATED = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Blob:
    """A stored blob."""

    digest: str
    size: int
    diff_id: str = ""
    """A layer's checksum before compression."""

    def descriptor(self, media_type: str) -> dict[str, Any]:
        """Its entry in a manifest."""
        return {"mediaType": media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class OciImage:
    """An image: its name after the registry's host, its tags, layers from the lowest, and entrypoint."""

    name: str
    tags: tuple[str, ...]
    layers: tuple[Blob, ...]
    entrypoint: tuple[str, ...] = ()
    user: str = ""
    environment: tuple[str, ...] = ()
    """Further variables, NAME=VALUE."""
    labels: Mapping[str, str] = field(default_factory=dict)


def config(image: OciImage, architecture: str) -> bytes:
    """The image configuration."""
    return _json({
        "created": CREATED,
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/bin", *image.environment],
            **({"User": image.user} if image.user else {}),
            **({"Entrypoint": list(image.entrypoint)} if image.entrypoint else {}),
            **({"Labels": dict(image.labels)} if image.labels else {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in image.layers]},
        "history": [{"created": CREATED} for _ in image.layers],
    })  # fmt: skip


def manifest(image: OciImage, configuration: Blob) -> bytes:
    """The image manifest."""
    return _json({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": configuration.descriptor(CONFIG_TYPE),
        "layers": [layer.descriptor(LAYER_TYPE) for layer in image.layers],
    })  # fmt: skip


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


class Blobs:
    """Files by the checksum of their content, in a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def layer(self, entries: Sequence[TreeEntry]) -> Blob:
        """Store a layer of ``entries``."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as stream:
            diff_id = write_compressed_tar(stream, entries)
        return replace(self._store(Path(stream.name)), diff_id=f"sha256:{diff_id}")

    def add(self, data: bytes) -> Blob:
        """Store ``data``."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as stream:
            stream.write(data)
        return self._store(Path(stream.name))

    def path(self, blob: Blob) -> Path:
        """The file of a blob."""
        return self.folder / blob.digest.removeprefix("sha256:")

    def _store(self, file: Path) -> Blob:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        file.chmod(0o644)
        file.rename(self.folder / digest)
        return Blob(f"sha256:{digest}", (self.folder / digest).stat().st_size)


class Registry:
    """Writes images below ROOT/v2; shared blobs are stored once and hard-linked."""

    def __init__(self, root: Path, architecture: str) -> None:
        self._root = root
        self._architecture = architecture
        self._blobs = Blobs(root / "blobs")

    def layer(self, entries: Sequence[TreeEntry]) -> Blob:
        """Store a layer of ``entries``."""
        return self._blobs.layer(entries)

    def add(self, image: OciImage) -> None:
        """Store ``image`` under its name, by every tag and by digest."""
        configuration = self._blobs.add(config(image, self._architecture))
        data = manifest(image, configuration)
        folder = self._root / "v2" / image.name
        for part in ("manifests", "blobs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for blob in (configuration, *image.layers):
            link = folder / "blobs" / blob.digest
            if not link.exists():
                os.link(self._blobs.path(blob), link)
        for reference in (*image.tags, f"sha256:{hashlib.sha256(data).hexdigest()}"):
            (folder / "manifests" / reference).write_bytes(data)


def write_archive(target: Path, image: OciImage, blobs: Blobs, architecture: str) -> str:
    """Write ``image`` as one file, which containerd imports and Docker loads; returns the digest of its manifest.

    ``blobs`` has its layers, and nothing else. An OCI image layout with the names that containerd and Docker read
    (containerd: core/images/archive/reference.go; Docker without its containerd image store reads manifest.json only:
    github.com/moby/moby, image/tarexport/load.go).
    """
    configuration = blobs.add(config(image, architecture))
    reference = f"{image.name}:{image.tags[0]}"
    stored = blobs.add(manifest(image, configuration))
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": image.tags[0]}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            stored.descriptor(MANIFEST_TYPE)
            | {"platform": {"architecture": architecture, "os": "linux"}, "annotations": names}
        ],
    }
    docker = {
        "Config": _path(configuration),
        "RepoTags": [reference],
        "Layers": [_path(layer) for layer in image.layers],
    }
    files: dict[str, bytes | Path] = {
        "index.json": _json(index),
        "manifest.json": json.dumps([docker], separators=(",", ":")).encode(),
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        **{_path(blob): blobs.path(blob) for blob in (configuration, stored, *image.layers)},
    }
    with target.open("wb") as stream:
        write_tar(stream, [TreeEntry(f"/{path}", files[path]) for path in sorted(files)])
    return stored.digest


def _path(blob: Blob) -> str:
    """Where an image layout has a blob."""
    return f"blobs/{blob.digest.replace(':', '/')}"
