"""The mirror's container images, under the names and tags that clusters pull."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from gpunodes.errors import GpunodesError
from gpunodes.lab.mirror.oci import Blob, OciImage, Registry
from gpunodes.lab.mirror.pins import ExtraImage, Minor, Pins
from gpunodes.lab.mirror.programs import run
from gpunodes.lab.mirror.tree import TreeEntry

MERGED = tuple(TreeEntry(f"/{name}", link=f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin"))
"""The links of a merged /usr."""
_ACCOUNTS = (
    TreeEntry("/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"),
    TreeEntry("/etc/group", b"root:x:0:\nnogroup:x:65534:\n"),
    TreeEntry("/tmp", mode=0o1777),  # noqa: S108 - a directory of the image
)
# Files that no program loads: documentation, translations, and glibc's converters and dynamic-linker helpers.
_SKIPPED = ("./usr/share/", "./usr/lib/systemd/", "./etc/ld.so.conf.d/", "./var/")
_CONVERTERS = "/gconv/"
# update-alternatives creates these links when the package is configured; here packages are only unpacked.
_IPTABLES = {
    f"/usr/sbin/{name}{suffix}": f"{name}-nft{suffix}"
    for name in ("iptables", "ip6tables")
    for suffix in ("", "-save", "-restore")
}


def wanted_archives(archives: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The .deb file of each of ``names``."""
    by_name = {path.name.split("_")[0]: path for path in archives}
    try:
        return [by_name[name] for name in names]
    except KeyError as missing:
        raise GpunodesError(f"Debian has no package {missing} for the lab's images") from missing


def unpack(archive: Path, skipped: tuple[str, ...] = _SKIPPED) -> Iterator[TreeEntry]:
    """The files and links of a .deb that an image needs, without what begins with one of ``skipped``."""
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.isdir() or member.name.startswith(skipped) or _CONVERTERS in member.name:
                continue
            path = member.name.removeprefix(".")
            if member.issym():
                yield TreeEntry(path, link=member.linkname)
            elif (stream := tar.extractfile(member)) is not None:
                yield TreeEntry(path, stream.read(), member.mode & 0o755)


def iptables_tree(archives: Sequence[Path]) -> list[TreeEntry]:
    """A tree in which iptables and nft run: the packages' files over a merged /usr, with iptables' links."""
    files = {entry.path: entry for archive in archives for entry in unpack(archive)}
    links = [TreeEntry(path, link=target) for path, target in _IPTABLES.items() if path not in files]
    return [*MERGED, *_ACCOUNTS, *files.values(), *links]


def busybox_tree(archive: Path, scratch: Path) -> list[TreeEntry]:
    """busybox with a link for each of its applets, over a merged /usr."""
    program = next(entry for entry in unpack(archive) if entry.path.endswith("bin/busybox"))
    if not isinstance(program.content, bytes):
        raise GpunodesError(f"{archive.name} has no busybox program")
    tool = scratch / "busybox"
    tool.write_bytes(program.content)
    tool.chmod(0o755)
    applets = [name for name in run([tool, "--list"]).split() if name != "busybox"]
    return [
        *MERGED,
        *_ACCOUNTS,
        TreeEntry("/usr/bin/busybox", program.content, 0o755),
        *(TreeEntry(f"/usr/bin/{name}", link="busybox") for name in applets),
    ]


def pause(source: Path, scratch: Path) -> bytes:
    """Kubernetes' pause program, compiled from the C source in its module."""
    target = scratch / "pause"
    run(["gcc", "-Os", "-s", "-static", "-o", target, source / "build" / "pause" / "linux" / "pause.c"])
    return target.read_bytes()


def common(
    registry: Registry,
    pins: Pins,
    archives: Sequence[Path],
    binaries: Mapping[str, Path],
    pause_program: bytes,
    pause_tags: Sequence[str],
    scratch: Path,
) -> Blob:
    """Add the images that do not depend on the Kubernetes minor; returns the layer with iptables for the others."""
    [busybox_archive] = wanted_archives(archives, [pins.busybox_package])
    iptables = registry.layer(iptables_tree(wanted_archives(archives, pins.image_packages)))
    busybox = registry.layer(busybox_tree(busybox_archive, scratch))
    flannel = registry.layer([TreeEntry("/opt/bin/flanneld", binaries["flannel"] / "flannel", 0o755)])
    plugin = registry.layer([TreeEntry("/flannel", binaries["flannel-cni-plugin"] / "flannel", 0o755)])
    sandbox = registry.layer([TreeEntry("/pause", pause_program, 0o755)])
    registry.add(OciImage("pause", tuple(pause_tags), (sandbox,), ("/pause",)))
    registry.add(OciImage("e2e-test-images/busybox", (pins.busybox_tag,), (busybox,)))
    # The init containers of kube-flannel.yml run cp.
    registry.add(
        OciImage("flannel-io/flannel", (pins.flannel_tag,), (iptables, busybox, flannel), ("/opt/bin/flanneld",)),
    )
    server = registry.layer([TreeEntry("/bin/registry", binaries["registry"] / "registry", 0o755)])
    registry.add(OciImage("library/registry", (pins.components["registry"].version,), (server,), ("/bin/registry",)))
    registry.add(OciImage("flannel-io/flannel-cni-plugin", (pins.flannel_cni_plugin_tag,), (busybox, plugin)))
    return iptables


def kubernetes(registry: Registry, minor: Minor, binaries: Mapping[str, Path], iptables: Blob) -> None:
    """Add the images of one Kubernetes minor."""

    def program(component: str, binary: str, path: str) -> Blob:
        return registry.layer([TreeEntry(path, binaries[component] / binary, 0o755)])

    tags = (f"v{minor.kubernetes.version}",)
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"):
        layer = program(minor.kubernetes.name, name, f"/usr/local/bin/{name}")
        layers = (iptables, layer) if name == "kube-proxy" else (layer,)
        registry.add(OciImage(name, tags, layers, (name,)))
    for etcd, tag in minor.etcds:
        registry.add(OciImage("etcd", (tag,), (registry.layer(etcd_tree(binaries[etcd.name])),)))
    coredns = program(minor.coredns.name, "coredns", "/coredns")
    registry.add(OciImage("coredns/coredns", (minor.coredns_tag,), (coredns,), ("/coredns",)))


def of_extra(registry: Registry, image: ExtraImage, binaries: Path | None, debian: Sequence[TreeEntry]) -> None:
    """Add an image of Debian's files, of a component's programs, or of programs over files."""
    layers = [registry.layer(debian)] if debian else []
    places = image.programs.values()
    if binaries:
        programs = [TreeEntry(place, binaries / name, 0o755) for name, place in image.programs.items()]
        layers.append(registry.layer(programs))
    entrypoint = (next(iter(places)),) if places and image.entrypoint else ()
    registry.add(OciImage(image.name, (image.tag,), tuple(layers), entrypoint))


def libraries_tree(archives: Sequence[Path]) -> list[TreeEntry]:
    """The packages' files, with the links of BLAS and LAPACK, which update-alternatives creates on a machine."""
    files = [entry for archive in archives for entry in unpack(archive)]
    links = {}
    for entry in files:
        path = PurePosixPath(entry.path)
        if path.parent.name in {"blas", "lapack"} and path.name.endswith(".so.3"):
            links[path] = TreeEntry(str(path.parent.parent / path.name), link=f"{path.parent.name}/{path.name}")
    return [*files, *links.values()]


def etcd_tree(binaries: Path) -> list[TreeEntry]:
    """The programs of the official image; that of etcd's main package is called server."""
    programs = {"etcd": "server", "etcdctl": "etcdctl", "etcdutl": "etcdutl"}
    return [TreeEntry(f"/usr/local/bin/{name}", binaries / program, 0o755) for name, program in programs.items()]


def check_tags(minor: Minor, kubeadm: Path, tree: Path, progress: Callable[[str], None]) -> None:
    """Check that the tree has every image of ``kubeadm config images list``."""
    listing = run([kubeadm, "config", "images", "list", "--kubernetes-version", f"v{minor.kubernetes.version}"])
    progress(f"Kubernetes {minor.minor}: checking the {len(listing.split())} images that kubeadm requires")
    for name in listing.split():
        path, tag = name.partition("/")[2].rsplit(":", 1)
        if not (tree / "v2" / path / "manifests" / tag).is_file():
            raise GpunodesError(f"kubeadm {minor.kubernetes.version} requires {name}, which the mirror does not have")
