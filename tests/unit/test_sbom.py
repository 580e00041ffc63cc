"""The list of an image's contents: names by which scanners find packages, and equal documents for equal contents."""

from __future__ import annotations

import hashlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "bootstrap"
SBOM: dict[str, Any] = runpy.run_path(str(ROOT / "sbom.py"))
CONTROL = """Package: libstdc++6
Source: gcc-14 (14.2.0-19)
Version: 1:14.2.0-19+deb13u1
Architecture: amd64
Description: GNU Standard C++ Library v3
 This package contains an additional runtime library.
"""


@pytest.fixture
def components(tmp_path: Path) -> list[dict[str, Any]]:
    """A package of Debian, one of Python, and a program."""
    archive = tmp_path / "libstdc++6.deb"
    archive.write_bytes(b"package")
    info = tmp_path / "site" / "Some.Package-1.0+local.dist-info"
    info.mkdir(parents=True)
    metadata = "Metadata-Version: 2.4\nName: Some.Package\nVersion: 1.0+local\nLicense-Expression: MIT\n"
    (info / "METADATA").write_text(metadata)
    (tmp_path / "kubectl").write_bytes(b"program")
    return [
        SBOM["debian"](archive, CONTROL, "trixie"),
        *SBOM["python"](tmp_path / "site"),
        SBOM["program"](tmp_path / "kubectl"),
    ]


def test_packages_have_the_names_of_scanners(components: list[dict[str, Any]]) -> None:
    debian, python, program = components
    version = "1%3A14.2.0-19%2Bdeb13u1"
    assert debian["purl"] == f"pkg:deb/debian/libstdc%2B%2B6@{version}?arch=amd64&distro=trixie&upstream=gcc-14"
    assert debian["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"package").hexdigest()}]
    assert python["purl"] == "pkg:pypi/some-package@1.0%2Blocal"
    assert python["licenses"] == [{"expression": "MIT"}]
    assert program["hashes"][0]["content"] == hashlib.sha256(b"program").hexdigest()
    assert "purl" not in program


def test_equal_contents_make_equal_documents(components: list[dict[str, Any]]) -> None:
    one = SBOM["document"]("example.org/some", "1.0", "sha256:00", components)
    assert one == SBOM["document"]("example.org/some", "1.0", "sha256:00", reversed(components))
    other = json.loads(SBOM["document"]("example.org/some", "1.0", "sha256:01", components))
    document = json.loads(one)
    assert document["serialNumber"] != other["serialNumber"]
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    [relation] = document["dependencies"]
    assert relation["ref"] == document["metadata"]["component"]["bom-ref"]
    assert relation["dependsOn"] == [each["bom-ref"] for each in document["components"]]


def test_a_program_of_a_release_has_the_name_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_bytes(b"program")
    release = SBOM["program"](tmp_path / "kubectl", ("k8s.io", "kubernetes"), "1.36.4")
    assert (release["version"], release["purl"]) == ("1.36.4", "pkg:golang/k8s.io/kubernetes@v1.36.4")
    assert "purl" not in SBOM["program"](tmp_path / "kubectl", ("k8s.io", "kubernetes"), "sha256:00")
