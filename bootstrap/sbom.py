"""The list of what an image contains, as CycloneDX 1.6 in JSON (https://cyclonedx.org/docs/1.6/json/).

Equal contents make equal documents: there is no time in it, and the serial number is that of the contents.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def purl(kind: str, path: Sequence[str], version: str, qualifiers: Mapping[str, str] = {}) -> str:
    """A package URL (https://github.com/package-url/purl-spec): the name by which scanners find a package."""
    name = "/".join(quote(part, safe="") for part in path)
    more = "&".join(f"{key}={quote(value, safe='')}" for key, value in sorted(qualifiers.items()) if value)
    return f"pkg:{kind}/{name}@{quote(version, safe='')}{'?' + more if more else ''}"


def checksum(path: Path) -> list[dict[str, str]]:
    """The SHA-256 of a file, as a component has it."""
    with path.open("rb") as stream:
        return [{"alg": "SHA-256", "content": hashlib.file_digest(stream, "sha256").hexdigest()}]


def debian(archive: Path, control: str, suite: str) -> Component:
    """A package of Debian: its file, and the fields of its control file."""
    fields = HeaderParser().parsestr(control)
    source = (fields["Source"] or "").partition(" ")[0]
    reference = purl(
        "deb",
        ("debian", fields["Package"]),
        fields["Version"],
        {"arch": fields["Architecture"], "distro": suite, "upstream": source},
    )
    return {
        "type": "library",
        "bom-ref": reference,
        "name": fields["Package"],
        "version": fields["Version"],
        "purl": reference,
        "hashes": checksum(archive),
    }


def python(site: Path) -> Iterable[Component]:
    """The Python packages that are installed in a folder."""
    for found in metadata.distributions(path=[str(site)]):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        reference = purl("pypi", (name,), found.version)
        component: Component = {
            "type": "library",
            "bom-ref": reference,
            "name": found.metadata["Name"],
            "version": found.version,
            "purl": reference,
        }
        if licence := found.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]
        yield component


def program(path: Path, module: Sequence[str] = (), version: str = "") -> Component:
    """A program that belongs to no package; of a release of a Go module, if its version is known."""
    component = {"type": "application", "bom-ref": f"file:{path.name}", "name": path.name, "hashes": checksum(path)}
    if version[:1].isdigit():
        component |= {"version": version, "purl": purl("golang", module, f"v{version}")}
    return component


def document(name: str, version: str, digest: str, components: Iterable[Component]) -> str:
    """The document of the image with this digest."""
    path = name.rpartition("/")[2]
    reference = purl("oci", (path,), digest, {"repository_url": name, "tag": version})
    listed = sorted(components, key=lambda component: str(component["bom-ref"]))
    contents = {
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": reference,
                "name": name,
                "version": version,
                "purl": reference,
            }
        },
        "components": listed,
        "dependencies": [{"ref": reference, "dependsOn": [component["bom-ref"] for component in listed]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(contents, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": serial.urn, "version": 1}
    return json.dumps(head | contents, indent=1) + "\n"
