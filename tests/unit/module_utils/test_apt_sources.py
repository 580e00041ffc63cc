"""The package sources of apt, as its files say."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import apt_sources, ledger, openpgp, packages
from gpunodes.ansible.module_utils.apt_sources import AptSource, of_lines, of_stanzas
from gpunodes.ansible.module_utils.host import keys, sources
from gpunodes.ansible.module_utils.host.changes import Changes
from gpunodes.ansible.module_utils.host.spec import Repository, Spec

URL = "https://pkgs.k8s.io/core:/stable:/v1.36/deb/"
LINE = f"deb [arch=amd64 signed-by=/k.gpg] {URL} /"


def test_lines() -> None:
    text = (
        f"# deb https://a /\n{LINE}\ndeb-src {URL} /\ndeb http://b trixie main contrib # and more\n\n deb http://c ./\n"
    )
    assert list(of_lines(text)) == [
        AptSource(URL, "/", [], "/k.gpg"),
        AptSource("http://b", "trixie", ["main", "contrib"]),
        AptSource("http://c", "./", []),
    ]


def test_stanzas() -> None:
    text = (
        "# one\nTypes: deb deb-src\nURIs: http://a http://b\nSuites: x\nComponents: main\n contrib\n"
        "signed-by: /k.gpg\n\nTypes: deb-src\nURIs: http://c\nSuites: x\n \t\n"
        "Types: deb\nEnabled: No\nURIs: http://d\nSuites: /\n\n"
        "Types: deb\nURIs: http://e\nSuites: /\nSigned-By:\n -----BEGIN\n .\n -----END\n"
    )
    assert list(of_stanzas(text)) == [
        AptSource("http://a", "x", ["main", "contrib"], "/k.gpg"),
        AptSource("http://b", "x", ["main", "contrib"], "/k.gpg"),
        AptSource("http://e", "/", [], "\n -----BEGIN\n .\n -----END"),
    ]


@pytest.mark.parametrize(
    ("text", "components", "written"),
    [
        ("", "", "own"),
        (LINE, "", ""),
        (LINE.replace("deb/ /", "deb /"), "", ""),
        (LINE.replace("/k.gpg", "OWN"), "", "own"),
        (LINE.replace("v1.36", "v1.35"), "", "own"),
        (f"deb {URL} trixie main", "main extra", "without a key"),
        (f"deb [signed-by=/k.gpg] {URL} trixie main", "main extra", "/k.gpg"),
        (f"deb [signed-by=/k.gpg] {URL} trixie main extra", "main extra", ""),
    ],
)
def test_apt_never_gets_two_keys_for_one_source(
    text: str, components: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's own file, of Kubernetes' instructions, provides the source; or ours gets the same key."""
    key, own = tmp_path / "own.asc", tmp_path / "sources.list.d/own.sources"
    monkeypatch.setattr(apt_sources, "FOLDER", str(tmp_path))
    monkeypatch.setattr(sources, "paths", lambda *_: (str(key), str(own)))
    monkeypatch.setattr(keys, "checked_key", lambda text, _: text)
    monkeypatch.setattr(openpgp, "only", lambda *_: None)
    monkeypatch.setattr(packages, "detect", packages.Apt)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    own.parent.mkdir()
    (own.parent / "kubernetes.list").write_text(text.replace("OWN", str(key)) + "\n")
    suite = "trixie" if components else "/"
    of_a_run = sources.Sources(Changes(Spec()))
    of_a_run.configure(Repository("own", URL, "-----BEGIN", suite=suite, components=components))
    assert key.exists() == (written == "own")
    found = own.read_text() if own.exists() else ""
    ends = {"own": f"Signed-By: {key}\n", "": "", "without a key": ""}
    assert found.endswith(ends.get(written, f"Signed-By: {written}\n"))
    assert ("Signed-By" in found, bool(found)) == (written in {"own", "/k.gpg"}, bool(written))
