"""The QEMU that emulates machines: the host's, or Debian 13's where the host's is older and much slower.

For a boot of Debian 13 and some common programs QEMU 7.2 took 56 s of processor time, QEMU 10.0 took 33 s.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.lab.host import Report, which
from gpunodes.lab.images import debootstrap
from gpunodes.lab.layout import System
from gpunodes.lab.mirror import store

_QUICK = 10
"""The first major version that was seen to be quicker."""
_SUITE = System.DEBIAN13.suite
_PACKAGES = ("qemu-system-x86", "seabios", "ipxe-qemu")
MODULES = Path("/usr/lib/x86_64-linux-gnu/qemu")
"""Where QEMU looks for modules. It ends when it finds those of another version (util/module.c)."""
# Its libraries are newer than the host's: its own loader starts it with them.
_SCRIPT = """\
#!/bin/sh
usr={tree}/usr
exec $usr/lib64/ld-linux-x86-64.so.2 --library-path $usr/lib/x86_64-linux-gnu $usr/bin/qemu-system-x86_64 \\
  -L $usr/share/qemu -L $usr/share/seabios -L $usr/lib/ipxe/qemu "$@"
"""


def program(cache: Path, report: Report) -> str:
    """The path of QEMU: the host's, or one that is kept in ``cache``.

    Raises:
        GpunodesError: the host has no QEMU, a tool failed, or apt on this machine has no source of Debian packages.
    """
    own = which("qemu-system-x86_64")
    if own is None:
        raise GpunodesError("QEMU is missing", remedy="apt-get install qemu-system-x86")
    if _major(own) >= _QUICK:
        return own

    def make(folder: Path) -> None:
        report(f"getting the QEMU of Debian's {_SUITE}, which is quicker than this machine's (once; half a minute)")
        tree = folder / "tree"
        debootstrap(_SUITE, tree, _PACKAGES, "--variant=extract")
        script = folder / "qemu"
        script.write_text(_SCRIPT.format(tree=target / "tree"))
        script.chmod(0o755)

    target = cache / "emulators" / f"qemu-{_SUITE}"
    with store.locked(target.parent, report):
        return str(store.keep(target, make) / "qemu")


def modules(program: str) -> Path:
    """The folder of the modules that belong to a QEMU of the cache."""
    return Path(program).parent / "tree" / MODULES.relative_to("/")


def _major(qemu: str) -> int:
    """The first number of its version; 0 where it tells none."""
    told = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\d+)", told)
    return int(found[1]) if found else 0
