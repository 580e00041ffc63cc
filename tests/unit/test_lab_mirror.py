"""The lab's mirror: packages, repositories, images and pins, without a build."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from gpunodes import settings
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab import mirror
from gpunodes.lab.mirror import aptrepo, deb, debian, gobuild, images, oci, packages, pin, pins, programs, store
from gpunodes.lab.mirror.construct import ABOUT
from gpunodes.lab.mirror.tree import MTIME, TreeEntry, write_tar
from gpunodes.planner import addons

needs = pytest.mark.skipif(bool(programs.missing_packages()), reason="needs the programs that a mirror is built with")

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGE = deb.DebPackage(
    "example",
    "1.0-1",
    "amd64",
    "Example <maintainer@example.org>",
    "Example",
    depends="libc6",
    conffiles=("/etc/example",),
    scripts=(("postinst", "#!/bin/sh\n"),),
)
ADDON_IMAGES = [image for name in ("addons", "monitoring", "dra") for image in pins.load().extras[name]]
ENTRIES = [TreeEntry("/usr/bin/example", b"#!/bin/sh\n", 0o755), TreeEntry("/etc/example", b"odd")]


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_tar_has_each_parent_once_and_fixed_owners_and_times() -> None:
    out = io.BytesIO()
    write_tar(out, [TreeEntry("/a/b/file", b"x"), TreeEntry("/a/b/link", link="file"), TreeEntry("/a/dir", mode=0o700)])
    assert names(out.getvalue()) == ["a", "a/b", "a/b/file", "a/b/link", "a/dir"]
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        assert {(member.uid, member.gid, member.mtime) for member in tar} == {(0, 0, MTIME)}
        assert [tar.getmember("a/dir").mode, tar.getmember("a/b/link").linkname] == [0o700, "file"]


def test_control_skips_empty_fields() -> None:
    text = deb.control(PACKAGE, 12)
    assert "Installed-Size: 12\nDepends: libc6\nSection: admin\n" in text
    assert "Conflicts" not in text


@needs
def test_dpkg_reads_the_package(tmp_path: Path) -> None:
    file = tmp_path / PACKAGE.file_name
    deb.write(PACKAGE, ENTRIES, file)
    assert programs.run(["dpkg-deb", "--field", file, "Version", "Depends"]) == "Version: 1.0-1\nDepends: libc6\n"
    listing = programs.run(["dpkg-deb", "--contents", file])
    assert re.search(r"^-rwxr-xr-x root/root .* \./usr/bin/example$", listing, re.MULTILINE)
    programs.run(["dpkg-deb", "--raw-extract", file, tmp_path / "out"])
    assert (tmp_path / "out" / "etc" / "example").read_bytes() == b"odd"
    assert (tmp_path / "out" / "DEBIAN" / "conffiles").read_text() == "/etc/example\n"


@needs
def test_package_is_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        deb.write(PACKAGE, ENTRIES, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_stanza_is_appended_to_the_control_text() -> None:
    assert aptrepo.stanza("Package: a\nVersion: 1\n\n", "pool/a.deb", 7, "ff") == (
        "Package: a\nVersion: 1\nFilename: pool/a.deb\nSize: 7\nSHA256: ff\n"
    )


def test_release_has_checksums_of_its_indexes() -> None:
    text = aptrepo.release({"Origin": "Example", "Suite": "trixie"}, {"main/Packages": b"abc"})
    assert text.startswith("Origin: Example\nSuite: trixie\nDate: Thu, 01 Jan 2026 00:00:00 GMT\nSHA256:\n ")
    assert text.endswith(f" {hashlib.sha256(b'abc').hexdigest()} 3 main/Packages\n")


@needs
def test_repository_is_signed(tmp_path: Path) -> None:
    key = aptrepo.signing_key(tmp_path / "cache")
    assert aptrepo.signing_key(tmp_path / "cache") == key
    assert key.home.stat().st_mode & 0o777 == 0o700
    aptrepo.publish(tmp_path, {"Suite": "/"}, {"Packages": b""}, key)
    ring = tmp_path / "ring.gpg"
    programs.run(["gpg", "--batch", "--yes", "--output", ring, "--dearmor"], stdin=key.armoured.encode())
    programs.run(["gpgv", "--keyring", ring, tmp_path / "InRelease"])
    programs.run(["gpgv", "--keyring", ring, tmp_path / "Release.gpg", tmp_path / "Release"])
    signed = (tmp_path / "InRelease").read_text().replace("Suite: /", "Suite: x")
    (tmp_path / "InRelease").write_text(signed)
    with pytest.raises(GpunodesError, match="BAD signature"):
        programs.run(["gpgv", "--keyring", ring, tmp_path / "InRelease"])


def test_debian_sources_include_updates() -> None:
    assert [line.split("] ")[1] for line in debian.sources("http://archive.example/debian", "trixie").splitlines()] == [
        "http://archive.example/debian trixie main",
        "http://archive.example/debian trixie-updates main",
    ]


@needs
def test_image_has_the_files_of_a_registry(tmp_path: Path) -> None:
    registry = oci.Registry(tmp_path, "amd64")
    layer = registry.layer(ENTRIES)
    assert layer == registry.layer(ENTRIES)
    registry.add(oci.OciImage("some/image", ("v1", "v2"), (layer,), ("/run",)))
    registry.add(oci.OciImage("other", ("v1",), (layer,)))
    folder = tmp_path / "v2" / "some" / "image"
    data = (folder / "manifests" / "v1").read_bytes()
    assert (folder / "manifests" / "v2").read_bytes() == data
    assert (folder / "manifests" / f"sha256:{hashlib.sha256(data).hexdigest()}").read_bytes() == data
    manifest = json.loads(data)
    for part in (manifest["config"], *manifest["layers"]):
        blob = (folder / "blobs" / part["digest"]).read_bytes()
        assert (len(blob), f"sha256:{hashlib.sha256(blob).hexdigest()}") == (part["size"], part["digest"])
    config = json.loads((folder / "blobs" / manifest["config"]["digest"]).read_bytes())
    assert config["config"]["Entrypoint"] == ["/run"]
    plain = subprocess.run(["zstd", "-dc", folder / "blobs" / layer.digest], check=True, capture_output=True).stdout
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]
    assert names(plain) == ["usr", "usr/bin", "usr/bin/example", "etc", "etc/example"]


def test_packages_have_the_layout_of_their_publishers(tmp_path: Path) -> None:
    for name in ("kubelet", "kubeadm", "kubectl", "containerd"):
        (tmp_path / name).write_bytes(b"")
    made = {package.name: (package, files) for package, files in packages.kubernetes("1.36.3", "amd64", tmp_path)}
    assert made["kubelet"][0].file_name == "kubelet_1.36.3-1.1_amd64.deb"
    assert {entry.path for entry in made["kubeadm"][1]} == {
        "/usr/bin/kubeadm",
        "/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf",
    }
    package, files = packages.containerd_io("2.2.9", ("trixie", 13), "amd64", tmp_path, tmp_path)
    assert package.version == "2.2.9-1~debian.13~trixie"
    assert "containerd" in package.conflicts
    assert TreeEntry("/etc/containerd/config.toml", b'disabled_plugins = ["cri"]\n') in files


def test_new_pin_has_the_replacements_of_its_module() -> None:
    old = {
        "Module": {"Path": "lab/kubernetes"},
        "Require": [{"Path": "k8s.io/kubernetes", "Version": "v1.36.2"}],
        "Tool": [{"Path": "k8s.io/kubernetes/cmd/kubelet"}],
        "Replace": [
            {"Old": {"Path": "k8s.io/api"}, "New": {"Path": "k8s.io/api", "Version": "v0.36.2"}},
            {"Old": {"Path": "example.org/other"}, "New": {"Path": "example.org/other", "Version": "v0.7.0"}},
        ],
    }
    replaced = [
        {"Old": {"Path": "k8s.io/api"}, "New": {"Path": "./staging/src/k8s.io/api"}},
        {"Old": {"Path": "example.org/a", "Version": "v1.0.0"}, "New": {"Path": "example.org/b", "Version": "v1.1.0"}},
        {"Old": {"Path": "example.org/part"}, "New": {"Path": "../part"}},
        {"Old": {"Path": "example.org/other"}, "New": {"Path": "./other"}},
    ]
    assert pin.go_mod(pins.Component("kubernetes", "1.36.3"), old, {"Go": "1.26.0", "Replace": replaced}) == (
        "module lab/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v1.36.3\n\n"
        "replace (\n\tk8s.io/api => k8s.io/api v0.36.3\n\texample.org/a v1.0.0 => example.org/b v1.1.0\n"
        "\texample.org/other => example.org/other v0.7.0\n)\n\n"
        "tool k8s.io/kubernetes/cmd/kubelet\n"
    )


@pytest.mark.parametrize("component", pins.load().components.values(), ids=lambda component: component.name)
def test_component_builds_the_pinned_version(component: pins.Component) -> None:
    modules, sums = component.modules
    direct = modules.read_text().partition("// indirect")[0]
    required = re.findall(r"^(?:require )?\t?([a-z][^\s/]*\.\S+) v(\S+)$", direct, re.MULTILINE)
    assert {version for _, version in required} == {component.version}
    assert re.search(r"^tool ", modules.read_text(), re.MULTILINE)
    for module, version in required:
        assert f"{module} v{version} h1:" in sums.read_text()


@pytest.mark.parametrize("minor", pins.load().minors.values(), ids=lambda minor: minor.minor)
def test_each_etcd_is_built_together_with_its_tools(minor: pins.Minor) -> None:
    for etcd, tag in minor.etcds:
        tools = re.findall(r"go\.etcd\.io/etcd/(\w+)/v3$", etcd.modules[0].read_text(), re.MULTILINE)
        assert set(tools) == {"etcdctl", "etcdutl", "server"}
        assert tag.startswith(etcd.version)


def test_the_image_of_etcd_has_the_programs_of_the_official_one(tmp_path: Path) -> None:
    tree = {entry.path: entry.content for entry in images.etcd_tree(tmp_path)}
    assert tree == {
        "/usr/local/bin/etcd": tmp_path / "server",
        "/usr/local/bin/etcdctl": tmp_path / "etcdctl",
        "/usr/local/bin/etcdutl": tmp_path / "etcdutl",
    }


def test_the_images_of_extras_are_those_that_clusters_pull() -> None:
    extras = pins.load().extras
    mirrored = {f"{each.name}:{each.tag}" for each in ADDON_IMAGES}
    [driver] = extras["dra"]
    assert settings.defaults()["gpunodes_dra_driver_image"].endswith(f"/{driver.name}:{driver.tag}")
    wanted = {image.partition("/")[2] for addon in addons.optional().values() for image in addon.images.values()}
    assert mirrored - {f"{driver.name}:{driver.tag}"} <= wanted
    [autoscaler] = extras["autoscaler"]
    assert settings.defaults()["gpunodes_autoscaler_image"].endswith(f"/{autoscaler.name}:{autoscaler.tag}")
    [training] = extras["training"]
    overlay = yaml.safe_load((EXAMPLES / "training/overlays/numpy/kustomization.yml").read_text())
    [image] = overlay["images"]
    assert (image["newName"].partition("/")[2], image["newTag"]) == (training.name, training.tag)
    [torch] = extras["torch"]
    jobs = (EXAMPLES / "training/base/train.yml", EXAMPLES / "training/base/load-data.yml")
    assert all(f"image: {torch.name}:{torch.tag}\n" in path.read_text() for path in jobs)


@needs
@pytest.mark.parametrize("image", ADDON_IMAGES, ids=lambda image: image.name)
def test_the_image_of_an_add_on_has_its_programs_where_its_publisher_has_them(
    tmp_path: Path, image: pins.ExtraImage
) -> None:
    assert image.component
    tools = re.findall(r"^(?:tool |\t)(\S+)$", image.component.modules[0].read_text(), re.MULTILINE)
    names = {re.sub(r"/v\d+$", "", tool).rpartition("/")[2] for tool in tools if " " not in tool}
    assert set(image.programs) <= names
    for name in image.programs:
        (tmp_path / name).write_bytes(b"program")
    files = [*ENTRIES] if image.packages else []
    images.of_extra(oci.Registry(tmp_path, "amd64"), image, tmp_path, files)
    assert (tmp_path / "v2" / image.name / "manifests" / image.tag).is_file()


@needs
def test_libraries_of_an_image_have_the_links_that_debian_makes_at_their_installation(tmp_path: Path) -> None:
    archive = tmp_path / PACKAGE.file_name
    deb.write(PACKAGE, [TreeEntry("/usr/lib/x/blas/libblas.so.3", b""), *ENTRIES], archive)
    assert {entry.path: entry.link for entry in images.libraries_tree([archive])} == {
        **dict.fromkeys(entry.path for entry in ENTRIES),
        "/usr/lib/x/blas/libblas.so.3": None,
        "/usr/lib/x/libblas.so.3": "blas/libblas.so.3",
    }


def test_the_image_of_the_registry_is_the_one_that_the_setting_names() -> None:
    image = settings.defaults()["gpunodes_registry_image"]
    assert image == f"docker.io/library/registry:{pins.load().components['registry'].version}"


def test_a_step_that_etcd_requires_is_in_the_mirror_of_that_minor_only() -> None:
    """etcd's guide for 3.7: every member has 3.6.11 or newer first."""
    tags = {name: [tag for _, tag in minor.etcds] for name, minor in pins.load().minors.items()}
    assert tags["1.37"] == ["3.7.0-0", "3.6.16-0"]
    assert tags["1.36"] == ["3.6.8-0"]


def test_new_pin_has_at_least_the_libraries_that_it_shares() -> None:
    old = {
        "Module": {"Path": "lab/agent"},
        "Require": [{"Path": "example.org/agent", "Version": "v0.7.0"}],
        "Tool": [{"Path": "example.org/agent/cmd"}],
    }
    libraries = {
        "Go": "1.26.4",
        "Require": [
            {"Path": "example.org/server", "Version": "v0.9.0"},
            {"Path": "k8s.io/api", "Version": "v0.36.2", "Indirect": True},
            # Kubernetes replaces it.
            {"Path": "k8s.io/kubectl", "Version": "v0.0.0", "Indirect": True},
        ],
    }
    assert pin.go_mod(pins.Component("agent", "0.7.0"), old, {"Go": "1.9"}, libraries) == (
        "module lab/agent\n\ngo 1.26.4\n\nrequire example.org/agent v0.7.0\n\n"
        "require k8s.io/api v0.36.2 // indirect\n\n\ntool example.org/agent/cmd\n"
    )


@pytest.mark.parametrize(
    "component",
    [each for each in pins.load().components.values() if each.libraries],
    ids=lambda component: component.name,
)
def test_a_component_shares_the_libraries_that_its_pin_names(component: pins.Component) -> None:
    own, other = (
        dict(re.findall(r"^\t(\S+) (v\S+) // indirect$", each.modules[0].read_text(), re.MULTILINE))
        for each in (component, pins.load().components[component.libraries])
    )
    differ = {path for path in own.keys() & other.keys() if own[path] != other[path]}
    assert not {path for path in differ if path.startswith(("k8s.io/", "sigs.k8s.io/", "golang.org/"))}


def test_new_pin_has_all_modules_of_a_release_and_no_indirect_one() -> None:
    old = {
        "Module": {"Path": "lab/etcd"},
        "Require": [
            {"Path": "example.org/ctl", "Version": "v3.6.6"},
            {"Path": "example.org/server", "Version": "v3.6.6"},
            {"Path": "example.org/other", "Version": "v1.0.0", "Indirect": True},
        ],
        "Tool": [{"Path": "example.org/server"}],
    }
    assert pin.go_mod(pins.Component("etcd", "3.6.8"), old, {"Go": "1.24.0"}) == (
        "module lab/etcd\n\ngo 1.24.0\n\nrequire (\n\texample.org/ctl v3.6.8\n\texample.org/server v3.6.8\n)\n\n\n"
        "tool example.org/server\n"
    )


def test_programs_print_the_pinned_version() -> None:
    for component in pins.load().components.values():
        for flag in component.ldflags:
            if re.search(r"[vV]ersion=", flag):
                assert flag.rpartition("=")[2].removeprefix("v") == component.version


@pytest.mark.parametrize(
    ("version", "enough"), [("go1.26.8\n", True), ("go1.27rc1", True), ("go1.25.9", False), ("go2.0", True)]
)
def test_old_go_is_not_used(version: str, enough: bool) -> None:
    assert gobuild.is_at_least(version, "1.26") is enough


def test_crash_leaves_no_incomplete_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "incomplete").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.keep(tmp_path / "target", fail)
    assert list(tmp_path.iterdir()) == []


def test_next_build_removes_the_remains_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / ".target.abcd1234").mkdir()
    with store.locked(tmp_path, pytest.fail):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_cached_folder_is_not_built_again(tmp_path: Path) -> None:
    store.keep(tmp_path / "target", lambda folder: (folder / "file").touch())
    kept = store.keep(tmp_path / "target", lambda _: pytest.fail("built again"))
    assert (kept / "file").exists()


def test_all_missing_programs_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("gpg", "zstd") else f"/usr/bin/{name}")
    monkeypatch.setattr(programs, "REQUIRED_FILES", {"/nowhere/seccomp.h": "libseccomp-dev"})
    with pytest.raises(GpunodesError, match="gpg, libseccomp-dev, zstd") as caught:
        programs.require()
    assert caught.value.problem.remedy == "apt-get install gpg libseccomp-dev zstd"


@pytest.mark.parametrize("wrong", [{"minors": ["1.99"]}, {"suites": ["sid"]}, {"extras": ["addon"]}], ids=str)
def test_unknown_minors_suites_and_extras_are_refused_before_any_change(
    tmp_path: Path, wrong: dict[str, list[str]]
) -> None:
    with pytest.raises(WrongInput, match="known:"):
        mirror.build(tmp_path, progress=pytest.fail, **{"minors": ["1.36"], "suites": ["trixie"], **wrong})
    assert list(tmp_path.iterdir()) == []


def test_settings_point_at_the_mirror(tmp_path: Path) -> None:
    (tmp_path / ABOUT).write_text('{"fingerprint": "ABCD"}')
    key = tmp_path / "docker" / "linux" / "debian" / "gpg"
    key.parent.mkdir(parents=True)
    key.write_text("armoured")
    assert mirror.settings("http://mirror.lab/", tmp_path) == {
        "gpunodes_kubernetes_packages_url": "http://mirror.lab/kubernetes/core:/stable:/v{minor}/{format}/",
        "gpunodes_kubernetes_packages_key": "armoured",
        "gpunodes_kubernetes_packages_fingerprint": "ABCD",
        "gpunodes_docker_packages_url": "http://mirror.lab/docker/linux/{system}",
        "gpunodes_docker_packages_key": "armoured",
        "gpunodes_docker_packages_fingerprint": "ABCD",
        "gpunodes_image_mirrors": {
            "docker.io": "http://mirror.lab",
            "ghcr.io": "http://mirror.lab",
            "quay.io": "http://mirror.lab",
            "registry.k8s.io": "http://mirror.lab",
        },
    }
