"""The stand-in GPUs: machines, packages and repositories of a lab with them, and the commands of their faults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from gpunodes.errors import WrongInput
from gpunodes.lab import hypervisor, inventory
from gpunodes.lab.images import DiskImage
from gpunodes.lab.layout import SUBNETS, Boards, LabRecord, LabRole, Layout, Size, System, plan_machines
from gpunodes.lab.mirror import deb, images, programs
from gpunodes.lab.standin import board, construct, faults, objects, packages, pins
from gpunodes.lab.standin.objects import SOURCES, Objects

BOARDS = Boards(gpus=2, switches=1, devices=("2330", "20b0"))
SIZES = {LabRole.CONTROL_PLANE: Size(4096, 2), LabRole.WORKER: Size(2048, 1)}


def record(workers: int = 1, gpu_workers: int = 2) -> LabRecord:
    identities = [(f"uuid-{number}", f"secret-{number}") for number in range(workers + gpu_workers + 1)]
    machines = plan_machines(SUBNETS[0], workers, SIZES, identities, gpu_workers, BOARDS)
    return LabRecord(
        "lab", System.DEBIAN13, str(SUBNETS[0]), "tcg", machines, "/somewhere/inventory", "/tree", "/standin"
    )


@pytest.fixture
def compiled(tmp_path: Path) -> Objects:
    """The files of objects.get(); their content does not matter here."""
    names = ["standin_board.ko", "nvidia-smi", "copyright", *packages.STUBS]
    names += [f"libnvidia-ml.so.{version}" for version in packages.DRIVERS]
    for name in names:
        (tmp_path / name).write_bytes(b"\x7fELF " + name.encode())
    return Objects(tmp_path)


def test_gpu_machines_are_workers_and_differ_from_the_others() -> None:
    machines = record().machines
    assert [each.name for each in machines] == ["control-1", "worker-1", "gpu-1", "gpu-2"]
    assert [each.boards for each in machines] == [None, None, BOARDS, BOARDS]
    assert {each.role for each in machines[1:]} == {LabRole.WORKER}
    assert len({each.address for each in machines}) == len({each.mac for each in machines}) == len(machines)


def test_a_record_with_boards_is_read_as_it_was_written_and_an_older_one_has_none() -> None:
    written = record()
    data = json.loads(json.dumps(written.to_json()))
    assert LabRecord.from_json(data) == written
    del data["standin"]
    for machine in data["machines"]:
        del machine["boards"]
    older = LabRecord.from_json(data)
    assert older.standin is None
    assert not any(each.boards for each in older.machines)


def test_the_inventory_has_a_group_of_gpu_machines_only_if_there_are_some() -> None:
    layout = Layout("lab", Path("/cache"))
    hosts = yaml.safe_load(inventory.texts(layout, record(), {})["hosts.yml"])
    assert list(hosts["all"]["children"]["gpu"]["hosts"]) == ["gpu-1", "gpu-2"]
    assert {"worker-1", "gpu-1", "gpu-2"} == set(hosts["all"]["children"]["workers"]["hosts"])
    none = yaml.safe_load(inventory.texts(layout, record(gpu_workers=0), {})["hosts.yml"])
    assert "gpu" not in none["all"]["children"]


def test_images_under_nvidias_name_ask_for_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's do: a pod of theirs is one that tries to get GPUs without a request."""
    monkeypatch.setattr(images, "wanted_archives", lambda *_: [tmp_path])
    monkeypatch.setattr(images, "busybox_tree", lambda *_: [])
    monkeypatch.setattr(images, "unpack", lambda _: iter(()))
    (tmp_path / "plugin").mkdir()
    tree = tmp_path / "tree"
    tree.mkdir()
    construct._images(tree, [], tmp_path / "plugin", "0.19.0")
    for name, tag in (("k8s-device-plugin", "v0.19.0"), ("cuda", construct.CUDA_TAG)):
        folder = tree / "v2/nvidia" / name
        digest = json.loads((folder / "manifests" / tag).read_text())["config"]["digest"]
        assert "NVIDIA_VISIBLE_DEVICES=all" in json.loads((folder / "blobs" / digest).read_text())["config"]["Env"]


def test_only_gpu_machines_reserve_a_page_of_memory() -> None:
    machine = record().machines[2]
    layout = Layout("lab", Path("/cache"))
    assert "memmap=4K$0x30000000" in hypervisor.domain_xml(layout, machine, "tcg", (board.KERNEL_OPTION,))
    assert "memmap" not in hypervisor.domain_xml(layout, machine, "tcg")
    # The page is within the memory of the smallest machine, outside of the kernel and the firmware.
    assert SIZES[LabRole.WORKER].memory_mib << 20 > board.LATCH


def test_the_boards_are_loaded_with_the_requested_options(compiled: Objects) -> None:
    one, other, unit, _ = board.guest_files(BOARDS, {"6.12.1": compiled, "7.3.4+x": compiled})
    assert one.data == other.data == compiled.board.read_bytes()
    # systemd replaces %v by the release of the running kernel.
    loaded = one.path.replace("6.12.1", "%v")
    assert loaded == other.path.replace("7.3.4+x", "%v")
    assert f"insmod {loaded} gpus=2 switches=1 device=0x2330,0x20b0 latch=0x30000000" in str(unit.content)


@pytest.mark.parametrize("text", ["", "0x2330", "2330,", "23301", "h100"])
def test_a_device_that_is_not_a_pci_id_is_refused(text: str) -> None:
    with pytest.raises(WrongInput, match="device"):
        board.device_ids(text)


def test_devices_are_hexadecimal_ids() -> None:
    assert board.device_ids("2330,20B0") == ("2330", "20b0")


def test_the_kernels_release_is_read_from_its_header(tmp_path: Path) -> None:
    header = bytearray(0x300)
    header[0x20E:0x210] = (0x40).to_bytes(2, "little")
    text = b"6.12.1-cloud-amd64 (someone@example.org) #1 SMP\0"
    header[0x240 : 0x240 + len(text)] = text
    (tmp_path / "vmlinuz").write_bytes(header)
    assert DiskImage(tmp_path).kernel_release == "6.12.1-cloud-amd64"


# --- faults ---


def script(name: str, code: int | None = None, **more: object) -> str:
    return faults.script(faults.FaultRequest(faults.known()[name], code, **more))  # type: ignore[arg-type]  # the fields of a request


@pytest.mark.parametrize("name", faults.known())
def test_every_fault_is_a_valid_shell_script(name: str) -> None:
    code = 79 if faults.known()[name].needs_code else None
    text = script(name, code)
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    assert "{" not in text.replace("{0,", "")


@pytest.mark.parametrize("name", faults.known())
def test_the_sources_implement_every_command_of_a_fault(name: str) -> None:
    fault = faults.known()[name]
    for commands, source in ((fault.driver, "nvidia/nvidia.c"), (fault.board, "board/standin_board.c")):
        text = (SOURCES / source).read_text()
        for command in commands:
            assert f'strcmp(word, "{command.split()[0]}")' in text


def test_an_xid_line_ends_with_the_text_of_its_code() -> None:
    assert "xid 1 79 3 pid=" in script("xid", 79, gpu=1, times=3)
    assert "GPU has fallen off the bus." in script("xid", 79)
    assert "name=<unknown>" in script("xid", 999)


@pytest.mark.parametrize(("name", "code"), [("xid", None), ("sxid", None), ("hang", 79), ("lost", 79)])
def test_a_missing_or_superfluous_code_is_refused(name: str, code: int | None) -> None:
    with pytest.raises(WrongInput, match="CODE"):
        script(name, code)


def test_a_fault_at_boot_is_an_option_of_the_driver() -> None:
    sync = "sync -f /etc/modprobe.d"
    write = "echo 'options nvidia fault=\"hang\"' > /etc/modprobe.d/standin-fault.conf"
    assert script("hang", at_boot=True) == f"{write} && {sync}"
    with pytest.raises(WrongInput, match="driver only"):
        script("lost", at_boot=True)


def test_clear_and_clear_all_remove_a_fault_at_boot() -> None:
    for name in ("clear", "clear-all"):
        assert "/etc/modprobe.d/standin-fault.conf; sync -f /etc/modprobe.d" in script(name)


def test_the_driver_does_not_build_while_the_file_of_the_fault_exists() -> None:
    file = faults.known()["no-build"].file
    assert file in (SOURCES / "nvidia/Kbuild").read_text()
    assert "#ifdef STANDIN_NO_BUILD" in (SOURCES / "nvidia/nvidia.c").read_text()
    # It needs no loaded driver, and both clearing faults end it.
    assert f": > {file}" in script("no-build")
    assert "debug" not in script("no-build")
    for name in ("clear", "clear-all"):
        assert file in script(name)


def test_a_fault_of_a_missing_gpu_is_refused() -> None:
    layout, request = Layout("lab", Path("/cache")), faults.FaultRequest(faults.known()["hang"])
    with pytest.raises(WrongInput, match="has no GPUs"):
        faults.make(layout, record().machines[0], request)
    with pytest.raises(WrongInput, match="GPUs 0 to 1"):
        faults.make(layout, record().machines[2], faults.FaultRequest(faults.known()["lost"], gpu=2))


# --- packages ---


def cuda_repository(compiled: Objects) -> list[packages.Parts]:
    parts = [part for version in packages.DRIVERS for part in packages.driver(version, compiled)]
    parts += [packages.cuda_toolkit(version, compiled) for version in packages.CUDA]
    return parts + packages.cudnn("13", compiled)


def test_packages_have_nvidias_names(compiled: Objects) -> None:
    offered = {f"{package.name} {package.version}" for package, _ in cuda_repository(compiled)}
    for name in ("nvidia-open-580", "cuda-drivers-580", "nvidia-open", "cuda-drivers", "nvidia-fabricmanager"):
        assert f"{name} 580.65.06-1" in offered
    assert {"nvidia-driver-pinning-580 580-1", "cuda-toolkit-13-0 13.0.0-1", "cudnn9-cuda-13 9.14.0.64-1"} <= offered
    # From branch 590 on only the name of the pinning package contains the branch.
    assert not any(each.startswith(("nvidia-open-590", "cuda-drivers-590")) for each in offered)


def test_all_dependencies_are_available(compiled: Objects) -> None:
    parts = cuda_repository(compiled)
    offered = {package.name for package, _ in parts}
    from_debian = {"dkms", "kmod", "libc6"}
    for package, _ in parts:
        for each in filter(None, package.depends.split(", ")):
            assert each.split()[0] in offered | from_debian, f"{package.name} depends on {each}"


def test_the_two_flavours_of_the_module_conflict(compiled: Objects) -> None:
    modules = {package.name: package for package, _ in cuda_repository(compiled) if package.name.endswith("dkms")}
    assert modules["nvidia-kernel-dkms"].conflicts == "nvidia-kernel-open-dkms"
    assert modules["nvidia-kernel-open-dkms"].conflicts == "nvidia-kernel-dkms"


def test_dkms_builds_the_modules_of_the_makefile(compiled: Objects) -> None:
    [entries] = [
        entries
        for package, entries in cuda_repository(compiled)
        if package.name == "nvidia-kernel-open-dkms" and package.version.startswith("580")
    ]
    files = {entry.path: entry.content for entry in entries}
    conf = files["/usr/src/nvidia-580.65.06/dkms.conf"]
    assert isinstance(conf, bytes)
    modules = re.findall(r'BUILT_MODULE_NAME\[\d\]="(.*)"', conf.decode())
    makefile = (SOURCES / "nvidia" / "Kbuild").read_text()
    assert [f"{name}.o" for name in modules] == re.findall(r"obj-m := (.*)", makefile)[0].split()
    assert {f"/usr/src/nvidia-580.65.06/{name}.c" for name in modules} <= set(files)


@pytest.mark.long
@pytest.mark.skipif(bool(programs.missing_packages()), reason="needs the programs that a mirror is built with")
def test_dpkg_reads_the_packages(compiled: Objects, tmp_path: Path) -> None:
    for package, entries in cuda_repository(compiled):
        file = tmp_path / package.file_name
        deb.write(package, entries, file)
        assert programs.run(["dpkg-deb", "--field", file, "Package"]) == f"{package.name}\n"


@pytest.mark.parametrize("name", pins.load())
def test_go_modules_require_the_pinned_version(name: str) -> None:
    component = pins.load()[name]
    modules, sums = component.modules
    assert re.search(rf"^require \S+ v{re.escape(component.version)}$", modules.read_text(), re.MULTILINE)
    assert sums.stat().st_size


# --- the library ---


def test_every_function_of_the_header_gets_a_stub() -> None:
    header = "nvmlReturn_t DECLDIR nvmlB(int a);\nnvmlReturn_t DECLDIR nvmlA(\n    int a);\n"
    assert [line.split()[2] for line in objects.stub_source(header).splitlines()] == ["nvmlA(void)", "nvmlB(void)"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
@pytest.mark.parametrize("source", sorted((SOURCES / "stubs").iterdir()), ids=lambda path: path.name)
def test_stub_libraries_compile(source: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", tmp_path / "out", source], check=True
    )


# --- the tree ---


def test_settings_make_gpu_machines_use_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-container").mkdir()
    (tmp_path / "libnvidia-container" / "gpgkey").write_text("KEY")
    (tmp_path / construct.ABOUT).write_text('{"fingerprint": "FF"}')
    found = construct.settings("http://mirror.lab", tmp_path)
    assert found["gpunodes_nvidia_packages_url"] == "http://mirror.lab/cuda/repos/{system}{release}/{cuda_arch}/"
    assert {value for name, value in found.items() if name.endswith("_key")} == {"KEY"}
