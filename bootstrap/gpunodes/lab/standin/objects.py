"""Compile the stand-in: the board's module for the image's kernel, and the libraries and tools of the driver.

Compilation runs on the host, in a temporary tree of the machines' Debian: an emulated machine takes a hundred times as
long. nvidia-smi is NVIDIA's own, downloaded from Debian's non-free archive; it is never part of this package.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.lab.host import Report
from gpunodes.lab.images import apt_options, debian_archive
from gpunodes.lab.mirror import store
from gpunodes.lab.mirror.programs import run
from gpunodes.lab.standin.pins import HERE, StandinComponent

SOURCES = HERE / "src"
_LIMIT_S = 1800

# In C a pointer; the header of the Go bindings wraps it into a structure of the same layout.
_WRAPPED = re.compile(r"typedef struct\s*\{\s*struct (nvml\w+_st)\s*\*\s*handle;\s*\}\s*(nvml\w+_t);")
_FUNCTION = re.compile(r"nvmlReturn_t DECLDIR (nvml\w+)\(")
_NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED of nvml.h."""

# $1: the tree, with the sources in /build and the results in /build/out.
_COMPILE = """set -eu
cp -r {inputs} "$1/build"
chroot "$1" sh -eu <<'END'
cd /build
mkdir out
make -s -C /usr/src/linux-headers-{kernel} M=/build/board modules
cp board/standin_board.ko out
for version in {versions}; do
    gcc -O2 -Wall -Werror -shared -fPIC -s "-DSTANDIN_VERSION=\\"$version\\"" -Iinclude -Wl,-soname,libnvidia-ml.so.1 \\
        -o out/libnvidia-ml.so.$version libnvidia-ml/nvml.c include/stubs.c
done
for library in {stubs}; do
    gcc -O2 -Wall -Werror -shared -fPIC -s -Wl,-soname,$library -o out/$library stubs/${{library%%.*}}.c
done
apt-get -qq -o APT::Sandbox::User=root download nvidia-smi
dpkg-deb -x nvidia-smi_*.deb smi
cp smi/usr/lib/nvidia/current/nvidia-smi smi/usr/share/doc/nvidia-smi/copyright out
END
cp "$1"/build/out/* {out}
"""


@dataclass(frozen=True)
class Objects:
    """The folder of compiled files."""

    folder: Path

    @property
    def board(self) -> Path:
        """The board's kernel module."""
        return self.folder / "standin_board.ko"

    @property
    def nvidia_smi(self) -> Path:
        """NVIDIA's own program."""
        return self.folder / "nvidia-smi"

    def library(self, name: str) -> Path:
        """The library of this name."""
        return self.folder / name


def get(
    home: Path,
    suite: str,
    kernel: str,
    versions: Sequence[str],
    stubs: Sequence[str],
    bindings: StandinComponent,
    go: Path,
    report: Report,
    archive_suites: Sequence[str] = (),
) -> Objects:
    """The compiled files for this Debian suite and kernel, built unless ``home`` has them.

    ``versions`` are driver versions, ``stubs`` names of libraries without functions, ``bindings`` is a component that
    requires the Go bindings of NVIDIA's library, for their header. ``archive_suites`` are suites of the archive besides
    ``suite`` that have the kernel's headers.

    Raises:
        GpunodesError: a tool failed, or Debian's archive no longer has the headers of this kernel.
    """
    inputs = hashlib.sha256(json.dumps([suite, kernel, versions, stubs, _COMPILE]).encode())
    for path in (*sorted(SOURCES.rglob("*")), bindings.modules[0]):
        if path.is_file():
            inputs.update(f"{path.name}\n".encode() + path.read_bytes())

    def make(out: Path) -> None:
        report(f"compiling the stand-in GPU for {suite}, kernel {kernel}")
        scratch = out / "build"
        shutil.copytree(SOURCES, scratch)
        (scratch / "include").mkdir()
        header = nvml_header(bindings, go)
        (scratch / "include" / "nvml.h").write_text(header)
        (scratch / "include" / "stubs.c").write_text(stub_source(header))
        script = out / "compile"
        fields = {"inputs": scratch, "out": out, "kernel": kernel}
        lists = {"versions": " ".join(versions), "stubs": " ".join(stubs)}
        script.write_text(_COMPILE.format(**{key: shlex.quote(str(value)) for key, value in fields.items()}, **lists))
        options = [argument for option in apt_options() for argument in ("--aptopt", option)]
        archive = debian_archive()
        try:
            run(
                ["nice", "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--format=null", *options,
                 "--components=main,non-free", "--include", f"gcc,make,libc6-dev,linux-headers-{kernel}",
                 "--dpkgopt=path-exclude=/usr/share/man/*", f'--customize-hook=sh {script} "$1"', suite, "-",
                 archive, *(f"deb {archive} {each} main" for each in archive_suites)],
                limit_s=_LIMIT_S,
            )  # fmt: skip
        except GpunodesError as error:
            if "Unable to locate package linux-headers" not in str(error):
                raise
            raise GpunodesError(
                f"Debian's archive no longer has the headers of the machines' kernel {kernel}",
                remedy=f"delete {home.parent}/images while no lab is up: the new image has a newer kernel",
            ) from error
        shutil.rmtree(scratch)
        script.unlink()

    return Objects(store.keep(home / f"objects-{suite}-{inputs.hexdigest()[:16]}", make))


def nvml_header(bindings: StandinComponent, go: Path) -> str:
    """NVIDIA's nvml.h, from the Go bindings that the component requires."""
    module = "github.com/NVIDIA/go-nvml"
    about = run([go, "mod", "download", "-json", module], cwd=bindings.modules[0].parent, env={"GOFLAGS": "-mod=mod"})
    text = (Path(json.loads(about)["Dir"]) / "pkg" / "nvml" / "nvml.h").read_text()
    return _WRAPPED.sub(r"typedef struct \1* \2;", text)


def stub_source(header: str) -> str:
    """C source in which every function of ``header`` returns "not supported", as a weak symbol that others override."""
    names = sorted(set(_FUNCTION.findall(header)))
    return "".join(f"__attribute__((weak)) int {name}(void) {{ return {_NOT_SUPPORTED}; }}\n" for name in names)
