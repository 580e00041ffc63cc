#!/usr/bin/env python3
"""Build the image of gpunodes as an OCI archive, and the list of its contents (sbom.py).

Needs neither root nor a container engine. Debian's packages are unpacked as for the lab's images; their scripts do not
run. Python's packages are those of requirements.lock, verified by their hashes. Equal inputs make equal archives.

kubectl (kubectl.py) is the only program that is not of Debian, which has none of a supported Kubernetes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import kubectl as client
import sbom
from gpunodes.errors import GpunodesError
from gpunodes.lab.mirror import debian, pins
from gpunodes.lab.mirror.images import MERGED, unpack
from gpunodes.lab.mirror.oci import Blobs, OciImage, write_archive
from gpunodes.lab.mirror.programs import run
from gpunodes.lab.mirror.tree import TreeEntry

ROOT = Path(__file__).parents[1]
NAME = "gpunodes.dev/gpunodes"
USER = 65532
"""The user of distroless images that run without root."""
# ssh runs the command of a jump host in a shell; typed passwords reach programs by cat; grpc needs the library of C++;
# libnss-extrausers reads the account that the entry point writes.
_PACKAGES = (
    "ca-certificates",
    "coreutils",
    "dash",
    "ipmitool",
    "libc-bin",
    "libnss-extrausers",
    "libstdc++6",
    "openssh-client",
    "python3",
)
# Dependencies of the packages' scripts.
_UNUSED = ("adduser", "debconf", "dpkg", "init-system-helpers", "login.defs", "passwd", "perl-base", "tar")
_SKIPPED = (
    "./etc/init.d/",
    "./etc/ld.so.conf.d/",
    "./usr/lib/systemd/",
    "./usr/lib/tmpfiles.d/",
    "./usr/lib32/",
    "./var/",
)
_SHARED = re.compile(r"/usr/share/(?!ca-certificates/|ipmitool/|misc/|doc/[^/]+/copyright$)")
_AUTHORITIES = "/usr/share/ca-certificates/mozilla/"
_SITE = "usr/lib/python3/dist-packages"
_HOME = "/tmp"  # noqa: S108 - a directory of the image, the only one that its user can write
_ACCOUNTS = (
    TreeEntry("/etc/passwd", f"root:x:0:0:root:/root:/bin/sh\ngpunodes:x:{USER}:{USER}::{_HOME}:/bin/sh\n".encode()),
    TreeEntry("/etc/group", f"root:x:0:\ngpunodes:x:{USER}:\n".encode()),
    TreeEntry("/etc/nsswitch.conf", b"passwd: extrausers files\ngroup: files\nhosts: files dns\n"),
    TreeEntry("/var/lib/extrausers/passwd", link=f"{_HOME}/.account"),
    TreeEntry(_HOME, mode=0o1777),
)
_ENTRY = "/usr/local/bin/as-user"
_AS_USER = f'''#!/usr/bin/python3 -IS
"""as-user COMMAND: run a command as the user of this container, who may be anybody.

ssh refuses a user without an account, and reads the home of the account instead of $HOME.
"""
import os, pwd, sys

number, home = os.getuid(), os.environ.get("HOME") or "{_HOME}"
try:
    known = pwd.getpwuid(number).pw_dir
except KeyError:
    known = ""
if number and known != home and not set(home) & set(":\\n"):
    group = os.getgid() if os.getgid() >= 500 else 100  # libnss-extrausers skips lower ones
    try:
        file = os.open("{_HOME}/.account", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        os.write(file, f"user:x:{{number}}:{{group}}::{{home}}:/bin/sh\\n".encode())
        os.close(file)
    except OSError as error:
        sys.stderr.write(f"as-user: no account for the user {{number}}: {{error}}; mount a writable {_HOME}\\n")
os.execvp(sys.argv[1], sys.argv[1:])
'''
"""The entry point. It changes nothing for the image's own user with the image's own home."""


def system(archives: Sequence[Path]) -> Iterator[TreeEntry]:
    """The files of Debian's packages, their list for vulnerability scanners, and the accounts."""
    yield from MERGED
    yield from _ACCOUNTS
    authorities = []
    for archive in archives:
        name = archive.name.partition("_")[0]
        if name in _UNUSED:
            continue
        yield TreeEntry(f"/var/lib/dpkg/status.d/{name}", run(["dpkg-deb", "--field", archive]).encode())
        for entry in unpack(archive, _SKIPPED):
            if not _SHARED.match(entry.path):
                yield entry
                if entry.path.startswith(_AUTHORITIES) and isinstance(entry.content, bytes):
                    authorities.append(entry.content)
    yield TreeEntry("/etc/ssl/certs/ca-certificates.crt", b"".join(authorities))
    yield TreeEntry("/usr/bin/python", link="python3")
    yield TreeEntry(_ENTRY, _AS_USER.encode(), 0o755)


def lay_out(entries: Iterable[TreeEntry], folder: Path) -> None:
    """Write ``entries`` into a folder, where programs can use them."""
    for entry in entries:
        path = folder / entry.path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.link is not None:
            path.symlink_to(entry.link)
        elif isinstance(entry.content, bytes):
            path.write_bytes(entry.content)
            path.chmod(entry.mode)
        else:
            path.mkdir()


def collected(folder: Path) -> Iterator[TreeEntry]:
    """The files of a folder, in a fixed order, writable by root only."""
    for path in sorted(folder.rglob("*")):
        name = f"/{path.relative_to(folder)}"
        if path.is_symlink():
            yield TreeEntry(name, link=str(path.readlink()))
        elif path.is_file():
            yield TreeEntry(name, path, 0o755 if os.access(path, os.X_OK) else 0o644)
        else:
            yield TreeEntry(name, mode=0o1777 if name == _HOME else 0o755)


def install(wheel: Path, python: str, folder: Path) -> None:
    """Install the wheel with the locked packages for that version of Python."""
    version, digest = wheel.name.split("-")[1], hashlib.sha256(wheel.read_bytes()).hexdigest()
    request = folder / "request.txt"
    request.write_text(f"gpunodes[autoscale,kubeconfig]=={version} --hash=sha256:{digest}\n")
    site = folder / _SITE
    run(
        [
            # pip does not take the hashes of a constraint.
            "uv", "pip", "install", "--python-version", python, "--python-platform",
            f"{platform.machine()}-manylinux_2_40", "--only-binary", ":all:", "--require-hashes", "--link-mode", "copy",
            "--find-links", wheel.parent, "--target", site, "--requirement", request,
            "--constraint", ROOT / "requirements.lock",
        ],
        limit_s=900,
    )  # fmt: skip
    request.unlink()
    (site / ".lock").unlink(missing_ok=True)
    programs = folder / "usr" / "local" / "bin"
    programs.mkdir(parents=True)
    for script in (site / "bin").iterdir():
        first, _, rest = script.read_text().partition("\n")
        if first.startswith("#!") and "python" in first:
            (programs / script.name).write_text(f"#!/usr/bin/python3\n{rest}")
            (programs / script.name).chmod(0o755)
    shutil.rmtree(site / "bin")


def compiled(base: Path, folders: Iterable[tuple[Path, str]], python: str) -> None:
    """Compile the Python files of folders, each below its root, by the image's own Python in ``base``.

    The root file system of a container is read-only: each start would compile everything.
    """
    [loader] = base.glob("usr/lib/*/ld-linux-*.so.*")
    for root, folder in folders:
        run(
            [
                loader, "--library-path", loader.parent, base / "usr" / "bin" / f"python{python}", "-S", "-m",
                "compileall", "-q", "-s", root, "-p", "/", "--invalidation-mode", "unchecked-hash", root / folder,
            ],
            env={"PYTHONHOME": str(base / "usr"), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            limit_s=1800,
        )  # fmt: skip


def with_program(program: Path, folder: Path) -> Iterator[TreeEntry]:
    """The files of a layer with one program on PATH, made in ``folder``."""
    target = folder / "usr" / "local" / "bin" / program.name
    target.parent.mkdir(parents=True)
    shutil.copy(program, target)
    target.chmod(0o755)
    return collected(folder)


def build(wheel: Path, target: Path, kubectl: Path) -> Path:
    """Build the archive in the folder ``target``, with the file that kubectl.py wrote; returns its path."""
    version, suite = wheel.name.split("-")[1], pins.load().image_suite
    archives = debian.download(suite, _PACKAGES, target / "image-packages", report)
    [python] = {match[1] for path in archives if (match := re.match(r"python(3\.\d+)_", path.name))}
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        base, packages = Path(temporary) / "base", Path(temporary) / "packages"
        packages.mkdir()
        lay_out(system(archives), base)
        report("installing the Python packages of requirements.lock")
        install(wheel, python, packages)
        report("compiling them")
        compiled(base, ((base, f"usr/lib/python{python}"), (packages, _SITE)), python)
        trees, programs = [collected(base), collected(packages)], []
        if (kubectl_version := client.name(kubectl)) != "none":
            trees.append(with_program(kubectl, Path(temporary) / "kubectl"))
            programs.append(sbom.program(kubectl, ("k8s.io", "kubernetes"), kubectl_version))
        blobs = Blobs(Path(temporary) / "blobs")
        image = OciImage(
            NAME,
            (version,),
            tuple(blobs.layer(list(tree)) for tree in trees),
            (_ENTRY, "gpunodes"),
            f"{USER}:{USER}",
            (f"HOME={_HOME}", "LANG=C.UTF-8"),
            {"org.opencontainers.image.version": version, "dev.gpunodes.kubectl": kubectl_version},
        )
        archive = target / f"gpunodes-image-{version}.oci.tar"
        digest = write_archive(archive, image, blobs, debian.architecture())
        contents = [*contained(archives, base, suite), *sbom.python(packages / _SITE), *programs]
    archive.with_name(f"gpunodes-image-{version}.cdx.json").write_text(
        sbom.document(NAME, version, digest, contents), encoding="utf-8"
    )
    report(f"{NAME}:{version} ({digest}, {archive.stat().st_size >> 20} MiB) in {archive}")
    return archive


def contained(archives: Sequence[Path], base: Path, suite: str) -> Iterator[sbom.Component]:
    """Debian's packages of the image."""
    for archive in archives:
        status = base / "var" / "lib" / "dpkg" / "status.d" / archive.name.partition("_")[0]
        if status.is_file():
            yield sbom.debian(archive, status.read_text(encoding="utf-8"), suite)


def report(line: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Build the archive that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kubectl", type=Path, help="the file that kubectl.py wrote")
    given = parser.parse_args()
    try:
        build(given.wheel, given.folder.resolve(), given.kubectl)
    except GpunodesError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
