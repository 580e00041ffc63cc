"""Images that are loaded into Docker."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import docker_images, process
from gpunodes.ansible.module_utils.problem import MachineProblem


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_only_what_is_mirrored_and_missing_is_loaded() -> None:
    wanted = ["registry.k8s.io/pause:3.10.2", "ghcr.io/flannel-io/flannel:v0.26.7", "quay.io/x:1"]
    mirrored = ["registry.k8s.io", "ghcr.io"]
    ours = ["ghcr.io/flannel-io/flannel:v0.26.7", "registry.k8s.io/kube-proxy:v1.36.3"]
    ours.append("registry.k8s.io/coredns/coredns:v1.14.2")
    assert docker_images.load_missing(wanted, mirrored, False, True).actions == [f"load {name}" for name in ours]
    assert len(docker_images.load_missing(wanted, mirrored, True, True).actions) == 4
    assert docker_images.load_missing(wanted, [], False, True).actions == []


@pytest.mark.parametrize("name", ["nvcr.io/plugin:v0.19.0", f"nvcr.io/plugin:v0.19.0@sha256:{'a' * 64}"])
def test_an_image_is_loaded_once(name: str) -> None:
    """A list of Docker's images has no digests: by it, one that is pinned was never there."""
    assert docker_images.load_missing([name], ["nvcr.io"], False, False).actions == [f"load {name}"]
    assert docker_images.load_missing([name], ["nvcr.io"], False, False).actions == []


def test_an_image_that_docker_does_not_keep_by_its_digest_is_said(programs: Path) -> None:
    """Docker's older store loads it and then does not find it: the node would ask the public registry."""
    (programs / "old").touch()
    with pytest.raises(MachineProblem, match="use Docker's containerd image store"):
        docker_images.load_missing([f"nvcr.io/plugin:v0.19.0@sha256:{'a' * 64}"], ["nvcr.io"], False, False)
