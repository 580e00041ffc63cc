"""An image that is loaded from an archive."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import containers, image_loaded, process
from gpunodes.ansible.module_utils.problem import MachineProblem

NAME, DIGESTS = "gpunodes.dev/gpunodes:1.0", ["sha256:aa", "sha256:bb"]


@pytest.fixture(params=[False, True], ids=["containerd", "docker"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ctr and docker of this test: an archive holds the line that the list of images gets."""
    images = tmp_path / "images"
    images.write_text("registry.k8s.io/pause:3.10 type sha256:cc\n")
    ctr = (
        f'case "$*" in\n*ls*) echo REF TYPE DIGEST; cat {images};;\n'
        f'*import*) eval "cat \\$$#" >>{images};;\n*rm*) eval "sed -i \\"\\|^\\$$#|d\\" {images}";;\nesac'
    )
    docker = (
        f'case "$*" in\n"image inspect"*) eval "grep \\"^\\$$# \\" {images}" | cut -d" " -f3 | grep .;;\n'
        f'"image ls"*) cut -d" " -f1 {images};;\nload*) cat "${{3#--input=}}" >>{images};;\n'
        f'"image rm"*) sed -i "\\|^$4|d" {images};;\nesac'
    )
    for name, text in {"docker": docker, "ctr": ctr}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(process, "PATH", f"{tmp_path}/bin:{process.PATH}")
    monkeypatch.setattr(containers, "is_docker", lambda: request.param)
    return tmp_path


def archive(folder: Path, line: str) -> str:
    (folder / "image.tar").write_text(f"{line}\n")
    return str(folder / "image.tar")


def test_an_image_is_loaded_once_and_its_archive_deleted(machine: Path) -> None:
    path = archive(machine, f"{NAME} type sha256:aa")
    assert image_loaded.load(NAME, DIGESTS, path, True).actions == [f"load {NAME}"]
    assert (Path(path).exists(), image_loaded.is_loaded(NAME, DIGESTS)) == (True, False)
    assert image_loaded.load(NAME, DIGESTS, path, False).actions == [f"load {NAME}"]
    assert (Path(path).exists(), image_loaded.is_loaded(NAME, DIGESTS)) == (False, True)
    assert image_loaded.load(NAME, DIGESTS, path, False).actions == []


def test_another_image_of_the_name_is_replaced(machine: Path) -> None:
    (machine / "images").write_text(f"{NAME} type sha256:old\n")
    report = image_loaded.load(NAME, DIGESTS, "unused", True)
    assert report.differences[0].before == {NAME: "sha256:old"}


def test_an_archive_without_the_image_is_a_problem(machine: Path) -> None:
    path = archive(machine, "other:1 type sha256:dd")
    with pytest.raises(MachineProblem, match="cannot be loaded"):
        image_loaded.load(NAME, DIGESTS, path, False)
    assert not Path(path).exists()


def test_all_images_of_the_repository_are_removed_and_no_other(machine: Path) -> None:
    with (machine / "images").open("a") as stream:
        stream.write(f"{NAME} type sha256:aa\ngpunodes.dev/gpunodes:0.9 type sha256:ee\n")
    done = image_loaded.remove("gpunodes.dev/gpunodes", False)
    assert done.actions == [f"remove {NAME}", "remove gpunodes.dev/gpunodes:0.9"]
    assert (machine / "images").read_text() == "registry.k8s.io/pause:3.10 type sha256:cc\n"
    assert image_loaded.remove("gpunodes.dev/gpunodes", False).actions == []


@pytest.mark.parametrize("other", ["", "registry.example/gpunodes:1.0 type sha256:aa\n"], ids=["alone", "another-name"])
def test_the_name_by_the_id_goes_with_the_last_name(machine: Path, other: str) -> None:
    """Of containerd: that of Docker has no such names."""
    others = f"registry.k8s.io/pause:3.10 type sha256:cc\nsha256:dd type sha256:cc\n{other}"
    (machine / "images").write_text(f"{NAME} type sha256:aa\nsha256:bb type sha256:aa\n{others}")
    image_loaded.remove("gpunodes.dev/gpunodes", False)
    left = "sha256:bb type sha256:aa\n" if other or containers.is_docker() else ""
    assert (machine / "images").read_text() == left + others


def test_a_runtime_that_does_not_respond_is_a_problem(machine: Path) -> None:
    for name in ("ctr", "docker"):
        (machine / "bin" / name).write_text("#!/bin/sh\necho cannot connect >&2; exit 1\n")
    with pytest.raises(MachineProblem, match="does not list its images"):
        image_loaded.remove("gpunodes.dev/gpunodes", False)
