"""Update a component's go.mod and go.sum to its version in pins.toml.

    python -m gpunodes.lab.mirror.pin kubernetes-1.36

For maintainers of the pins: change the version in pins.toml, run this, commit both. The module and its programs are
read from the existing go.mod; for a new component, copy the folder of a similar one and change those two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.lab.mirror.pins import Component, load
from gpunodes.lab.mirror.programs import run


def go_mod(
    component: Component,
    old: Mapping[str, Any],
    upstream: Mapping[str, Any],
    libraries: Mapping[str, Any] | None = None,
) -> str:
    """A go.mod that requires the component's version, with the replacements of the component's own go.mod.

    ``libraries``: the go.mod of the component whose libraries it shares.

    Go applies replacements of the main module only. Kubernetes replaces its staging modules by folders of its own
    repository; they are published as v0.MINOR.PATCH. Other projects' folders are published as modules with versions of
    their own: the existing go.mod's replacement of such a module is kept.
    """
    staged = f"v0.{component.version.partition('.')[2]}"
    chosen = {each["Old"]["Path"]: each["New"] for each in old.get("Replace") or ()}
    replacements = []
    for each in upstream.get("Replace") or ():
        before, after = each["Old"], each["New"]
        left = " ".join(filter(None, (before["Path"], before.get("Version"))))
        if not after["Path"].startswith("."):
            replacements.append(f"{left} => {after['Path']} {after['Version']}")
        elif after["Path"].startswith("./staging/"):
            replacements.append(f"{left} => {before['Path']} {staged}")
        elif kept := chosen.get(before["Path"]):
            replacements.append(f"{left} => {kept['Path']} {kept['Version']}")
    # Several are modules of one release, as etcd's server and its tools.
    modules = [each["Path"] for each in old["Require"] if not each.get("Indirect")]
    further = [each for each in (libraries or {}).get("Require", ()) if each.get("Indirect")]
    # Of modules that it replaces it may require a version that does not exist.
    further = [each for each in further if each["Version"] != "v0.0.0"]
    shared = [f"{each['Path']} {each['Version']} // indirect" for each in further]
    versions = (upstream["Go"], (libraries or upstream)["Go"])
    return "\n".join(
        [
            f"module {old['Module']['Path']}\n",
            f"go {max(versions, key=lambda version: [int(part) for part in version.split('.')])}\n",
            _block("require", [f"{module} v{component.version}" for module in modules]),
            *([_block("require", shared)] if shared else []),
            _block("replace", replacements),
            _block("tool", [tool["Path"] for tool in old["Tool"]]),
        ]
    )


def _block(directive: str, lines: Sequence[str]) -> str:
    """The lines of one directive, as gofmt formats them."""
    if len(lines) < 2:  # noqa: PLR2004 - a block has more than one line
        return "".join(f"{directive} {line}\n" for line in lines)
    return f"{directive} (\n" + "".join(f"\t{line}\n" for line in lines) + ")\n"


def pin(component: Component) -> None:
    """Rewrite the component's go.mod and go.sum; Go adds the indirect requirements."""
    modules, sums = component.modules
    folder = modules.parent
    old = json.loads(run(["go", "mod", "edit", "-json", modules]))
    requirement = f"{old['Require'][0]['Path']}@v{component.version}"
    about = json.loads(run(["go", "mod", "download", "-json", requirement], cwd=Path("/")))
    upstream = json.loads(run(["go", "mod", "edit", "-json", about["GoMod"]]))
    other = load().components.get(component.libraries)
    libraries = json.loads(run(["go", "mod", "edit", "-json", other.modules[0]])) if other else None
    modules.write_text(go_mod(component, old, upstream, libraries))
    sums.unlink(missing_ok=True)
    environment = {"GOFLAGS": "-mod=mod", "CGO_ENABLED": "1" if component.cgo else "0"}
    run(["go", "list", "-deps", "-tags", ",".join(component.tags), "tool"], cwd=folder, env=environment, limit_s=900)


def main(names: Sequence[str]) -> None:
    """Pin the components with these names."""
    for name in names:
        pin(load().components[name])


if __name__ == "__main__":
    main(sys.argv[1:])
