"""All that a release consists of: the files of dist, as `make dist` fills it, each used in an empty environment.

test_installed.py uses the same wheel, test_collection.py the same collection, test_built_image.py the same image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from gpunodes import __version__

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
GPUNODES = os.environ.get("GPUNODES", "")
WHEEL = DIST / f"gpunodes-{__version__}-py3-none-any.whl"
pytestmark = pytest.mark.skipif(
    not (GPUNODES and (DIST / "SHA256SUMS").exists()), reason="needs dist and $GPUNODES; run `make test-package`"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source archive: no git, no tags, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(DIST / f"gpunodes-{__version__}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return unpacked


def built(kind: str, source: Path, out: Path) -> Path:
    """The archive that is built of a tree, without the network."""
    argv = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(out)}
    subprocess.run(argv, cwd=out, env=environment, capture_output=True, check=True)
    [archive] = out.iterdir()
    return archive


def test_dist_is_complete() -> None:
    names = {path.name for path in DIST.iterdir()}
    assert names == {
        WHEEL.name,
        f"gpunodes-{__version__}.tar.gz",
        f"gpunodes-bootstrap-{__version__}.tar.gz",
        f"gpunodes-image-{__version__}.oci.tar",
        f"gpunodes-image-{__version__}.cdx.json",
        f"gpunodes-{__version__}-man.tar.gz",
        "gpunodes.bash",
        "_gpunodes",
        "gpunodes.fish",
        "SHA256SUMS",
    }
    sums = dict(line.split("  ")[::-1] for line in (DIST / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == names - {"SHA256SUMS"}
    for name, digest in sums.items():
        with (DIST / name).open("rb") as stream:
            assert hashlib.file_digest(stream, "sha256").hexdigest() == digest, name


def test_the_source_archive_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    wheel = built("wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(WHEEL) as published:
        assert set(ours.namelist()) == set(published.namelist())
        changed = [name for name in ours.namelist() if ours.read(name) != published.read(name)]
        assert changed == []
    assert wheel.read_bytes() == WHEEL.read_bytes(), "two builds must be equal"


def test_the_source_archive_builds_the_same_source_archive(source: Path, tmp_path: Path) -> None:
    assert built("sdist", source, tmp_path).read_bytes() == (DIST / f"gpunodes-{__version__}.tar.gz").read_bytes()


def test_two_builds_of_the_collection_are_equal(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "bootstrap" / "collection.py", tmp_path], capture_output=True, check=True)
    [archive] = tmp_path.iterdir()
    assert archive.read_bytes() == (DIST / archive.name).read_bytes()


def test_manual_pages_are_found(tmp_path: Path) -> None:
    """Unpacked below a prefix of man's search path."""
    with tarfile.open(DIST / f"gpunodes-{__version__}-man.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    page = tmp_path / "share" / "man" / "man1" / "gpunodes-join.1"
    assert page.read_text().startswith(".TH GPUNODES")
    if shutil.which("man") is None:
        pytest.skip("man is not installed")
    done = subprocess.run(
        ["man", "--where", "gpunodes-join"],
        env={"PATH": os.environ["PATH"], "MANPATH": str(tmp_path / "share" / "man")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(page), done.stderr


@pytest.mark.parametrize(
    ("shell", "name"), [("bash", "gpunodes.bash"), ("zsh", "_gpunodes"), ("fish", "gpunodes.fish")]
)
def test_shells_read_their_completion(shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", DIST / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes(tmp_path: Path) -> None:
    """By the function that the file registers, with the variables that bash gives it."""
    script = (
        f"source {DIST}/gpunodes.bash && [[ $(complete -p gpunodes) == *'-F _gpunodes_completion gpunodes' ]] && "
        'COMP_WORDS=(gpunodes init-ma) COMP_CWORD=1 && _gpunodes_completion gpunodes && echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{Path(GPUNODES).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "init-master\n", done.stderr


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {DIST}/gpunodes.fish; complete -C 'gpunodes init-ma'"],
        env={"PATH": f"{Path(GPUNODES).parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "init-master" in done.stdout, done.stderr


def test_the_list_of_contents_has_what_is_in_the_image() -> None:
    """And the digest of that image."""
    document = json.loads((DIST / f"gpunodes-image-{__version__}.cdx.json").read_text())
    with tarfile.open(DIST / f"gpunodes-image-{__version__}.oci.tar") as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        [image] = json.load(index)["manifests"]
    assert image["digest"].replace(":", "%3A") in document["metadata"]["component"]["purl"]
    versions = {component["purl"].partition("?")[0]: component for component in document["components"]}
    assert f"pkg:pypi/gpunodes@{__version__}" in versions
    names = {name.partition("@")[0] for name in versions}
    assert {
        "pkg:pypi/ansible-core",
        "pkg:pypi/grpcio",
        "pkg:pypi/kubernetes",
        "pkg:deb/debian/openssh-client",
        "pkg:deb/debian/libc6",
    } <= names
