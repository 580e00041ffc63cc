"""The lab's plan, and its configuration of libvirt, dnsmasq, the kernel and Ansible."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import shutil
import subprocess
from ipaddress import IPv4Network
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner
from gpunodes.cli import lab as cli_lab
from gpunodes.errors import WrongInput
from gpunodes.lab import disks, doctor, hypervisor, images, initrd, inventory, lab, network
from gpunodes.lab.host import Owner
from gpunodes.lab.layout import (
    SUBNETS,
    Boards,
    Equipment,
    LabMachine,
    LabRecord,
    LabRole,
    Layout,
    Size,
    System,
    cache_dir,
    free_subnet,
    plan_machines,
)
from gpunodes.lab.mirror import REQUIRED_FILES, REQUIRED_PACKAGES
from gpunodes.lab.plan import LabRequest

SIZES = {LabRole.CONTROL_PLANE: Size(4096, 2), LabRole.WORKER: Size(2048, 1)}


def record(workers: int = 2, accelerator: str = "tcg", mirror: str | None = None) -> LabRecord:
    identities = [(f"00000000-0000-4000-8000-{number:012d}", f"secret-{number}") for number in range(workers + 1)]
    machines = plan_machines(SUBNETS[0], workers, SIZES, identities)
    return LabRecord("lab", System.DEBIAN13, str(SUBNETS[0]), accelerator, machines, "/somewhere/inventory", mirror)


@pytest.mark.parametrize("name", ["", "Two", "a-b", "../x", "1lab", "elevenchars"])
def test_a_name_that_is_not_valid_for_a_link_is_refused(name: str) -> None:
    with pytest.raises(WrongInput, match="the lab's name is"):
        Layout(name, Path("/cache"))


def test_two_labs_share_no_name_and_no_path() -> None:
    one, two = Layout("lab", Path("/cache")), Layout("two", Path("/cache"))
    for part in ("namespace", "link", "state", "disks", "libvirt_uri", "ssh_key"):
        assert getattr(one, part) != getattr(two, part)
    assert len(Layout("a123456789", Path("/cache")).link) <= 15


def test_machines_have_unique_names_addresses_and_passwords() -> None:
    machines = record(workers=9).machines
    for part in ("name", "address", "mac", "uuid", "bmc_port", "bmc_password"):
        assert len({getattr(machine, part) for machine in machines}) == 10
    assert [machine.role for machine in machines] == [LabRole.CONTROL_PLANE] + [LabRole.WORKER] * 9


def test_machines_of_two_subnets_have_different_hardware_addresses() -> None:
    identity = [("u", "p")]
    first, second = (plan_machines(subnet, 0, SIZES, identity)[0] for subnet in SUBNETS[:2])
    assert first.mac != second.mac


def test_a_record_is_read_as_it_was_written() -> None:
    written = record(mirror="/cache/tree")
    assert LabRecord.from_json(json.loads(json.dumps(written.to_json()))) == written


def test_an_unknown_machine_is_refused_with_the_existing_names() -> None:
    with pytest.raises(WrongInput, match="control-1, worker-1, worker-2"):
        record().machine("worker-3")


def test_the_first_free_subnet_is_taken() -> None:
    assert free_subnet([]) == SUBNETS[0]
    assert free_subnet([IPv4Network("10.213.0.254/32"), IPv4Network("192.168.0.0/16")]) == SUBNETS[1]
    with pytest.raises(WrongInput, match="routes into all"):
        free_subnet([IPv4Network("10.0.0.0/8")])
    # The second network of that subnet is in use.
    assert free_subnet([IPv4Network("10.214.0.0/24")]) == SUBNETS[1]


def test_the_cache_follows_the_base_directory_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/gpunodes")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/gpunodes")


LAYOUT = Layout("lab", Path("/cache"))


def domain(accelerator: str, machine: LabMachine | None = None) -> ElementTree.Element:
    xml = hypervisor.domain_xml(LAYOUT, machine or record().machines[1], accelerator)
    return ElementTree.fromstring(xml)  # noqa: S314 - written by the lab


def test_each_emulated_machine_starts_it_with_a_niceness(tmp_path: Path) -> None:
    layout = Layout("lab", tmp_path / "cache", tmp_path / "run")
    layout.state.mkdir(parents=True)
    hypervisor.prepare(layout, "/cache/emulators/qemu")
    control, worker, _ = record().machines
    gpu = dataclasses.replace(worker, boards=Boards(1, 0, ("20b0",)))

    def niceness(machine: LabMachine) -> int:
        script = layout.state / Path(domain("tcg", machine).findtext("devices/emulator", "")).name
        *_, started = script.read_text().splitlines()
        assert started.endswith(' /cache/emulators/qemu "$@"')
        return int(started.split()[3])

    assert niceness(worker) > niceness(gpu) > niceness(control) == 0
    assert domain("kvm").find("devices/emulator") is None


def test_the_cpu_feature_that_crashes_emulated_kernels_is_disabled() -> None:
    emulated = domain("tcg")
    assert emulated.get("type") == "qemu"
    disabled = {each.get("name") for each in emulated.findall("cpu/feature[@policy='disable']")}
    assert "cx16" in disabled
    assert domain("kvm").get("type") == "kvm"
    assert domain("kvm").findall("cpu/feature") == []


def test_a_machine_starts_from_the_labs_copies() -> None:
    machine = domain("tcg")
    assert machine.findtext("os/kernel") == "/cache/run/lab/vmlinuz"
    assert machine.findtext("name") == "worker-1"
    source = machine.find("devices/disk/source")
    assert source is not None
    assert source.get("file") == "/cache/run/lab/worker-1.qcow2"


def test_dnsmasq_knows_every_machine_and_the_mirror() -> None:
    lines = network.dnsmasq_config(LAYOUT, record()).splitlines()
    for machine in record().machines:
        assert f"dhcp-host={machine.mac},{machine.address},{machine.name},infinite" in lines
    assert "host-record=mirror.lab,10.213.0.1" in lines
    assert "no-resolv" in lines


EQUIPPED = Equipment(second_network=True, data_disk=True)


def equipped() -> LabRecord:
    identities = [(f"00000000-0000-4000-8000-{number:012d}", f"secret-{number}") for number in range(2)]
    machines = plan_machines(SUBNETS[0], 1, SIZES, identities, equipment=EQUIPPED)
    return dataclasses.replace(record(), machines=machines)


def test_the_second_network_alone_has_the_default_route() -> None:
    lines = network.dnsmasq_config(LAYOUT, equipped()).splitlines()
    assert "dhcp-option=tag:lab0,option:router" in lines
    assert "dhcp-option=tag:lab1,option:router,10.214.0.1" in lines
    assert "dhcp-host=52:54:00:d6:00:0b,10.214.0.11,infinite" in lines
    assert "dhcp-option=tag:lab0,option:router,10.213.0.1" in network.dnsmasq_config(LAYOUT, record()).splitlines()


def test_machines_do_not_reach_each_other_in_the_second_network() -> None:
    machine = domain("tcg", equipped().machines[0])
    assert [source.get("bridge") for source in machine.findall("devices/interface/source")] == ["lab0", "lab1"]
    assert [link.find("port") is not None for link in machine.findall("devices/interface")] == [False, True]


def test_a_data_disk_is_mounted_at_data(tmp_path: Path) -> None:
    key = tmp_path / "ssh_host_ed25519_key"
    disks.make_key(key, "root@worker-1")
    [machine, _] = equipped().machines
    files = {each.path: each.content for each in disks.guest_files(equipped(), machine, "ssh-ed25519 A", key)}
    assert "LABEL=data /data ext4" in str(files["/etc/fstab"])
    sources = [source.get("file") for source in domain("tcg", machine).findall("devices/disk/source")]
    assert sources == ["/cache/run/lab/control-1.qcow2", "/cache/run/lab/control-1-data.qcow2"]


def test_a_record_with_all_equipment_is_read_as_it_was_written() -> None:
    assert LabRecord.from_json(json.loads(json.dumps(equipped().to_json()))) == equipped()


def test_guest_files_have_each_machines_own_identity(tmp_path: Path) -> None:
    key = tmp_path / "ssh_host_ed25519_key"
    disks.make_key(key, "root@worker-1")
    lab = record()
    first, second = ({f.path: f for f in disks.guest_files(lab, m, "ssh-ed25519 A", key)} for m in lab.machines[:2])
    assert first["/etc/machine-id"].content != second["/etc/machine-id"].content
    assert first["/etc/hostname"].content == "control-1\n"
    assert first["/etc/ssh/ssh_host_ed25519_key"].mode == 0o600
    assert len(first["/etc/machine-id"].content) == 33


def test_host_keys_are_the_same_after_the_cache_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file may be missing in a container.
    (tmp_path / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr(disks, "_HOST_MACHINE_ID", tmp_path / "machine-id")
    one, two = record().machines[:2]
    keys = [disks.host_key(Layout("lab", tmp_path / cache), one) for cache in ("before", "after")]
    keys.append(disks.host_key(Layout("lab", tmp_path / "after"), two))
    public = [key.with_suffix(".pub").read_text().split()[:2] for key in keys]
    assert public[0] == public[1] != public[2]
    assert keys[0].stat().st_mode & 0o077 == 0
    # OpenSSH can read the private key.
    derived = subprocess.run(["ssh-keygen", "-y", "-f", keys[0]], capture_output=True, text=True, check=True).stdout
    assert derived.split()[:2] == public[0]


DEPENDENCIES = """kernel/block/virtio_blk.ko.xz: kernel/virtio/virtio.ko.xz kernel/virtio/virtio_ring.ko.xz
kernel/virtio/virtio.ko.xz:
kernel/virtio/virtio_ring.ko.xz: kernel/virtio/virtio.ko.xz
kernel/crypto/crc32c_generic.ko.xz:
"""


def test_modules_load_after_their_dependencies() -> None:
    order = initrd.load_order(["virtio_blk", "ext4", "missing"], DEPENDENCIES, "kernel/fs/ext4/ext4.ko\n")
    assert [path.rpartition("/")[2] for path in order] == ["virtio.ko.xz", "virtio_ring.ko.xz", "virtio_blk.ko.xz"]


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox reads the archive")
def test_busybox_unpacks_the_ramdisk(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    for line in DEPENDENCIES.splitlines():
        path = modules / line.partition(":")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(path.name.encode()))
    (modules / "modules.dep").write_text(DEPENDENCIES)
    (modules / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    program = tmp_path / "busybox"
    program.write_bytes(b"ELF")
    archive = gzip.decompress(initrd.build(modules, program))
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["busybox", "cpio", "-id"], input=archive, cwd=unpacked, check=True, capture_output=True)
    assert (unpacked / "modules/order").read_text().split() == [
        "crc32c_generic.ko", "virtio.ko", "virtio_ring.ko", "virtio_blk.ko"
    ]  # fmt: skip
    assert (unpacked / "modules/virtio_blk.ko").read_bytes() == b"virtio_blk.ko.xz"
    assert (unpacked / "init").stat().st_mode & 0o111
    assert (unpacked / "bin/busybox").read_bytes() == b"ELF"


def test_debians_archive_is_found_among_other_sources() -> None:
    listed = (
        "https://example.org/apt nodistro main\n"
        "http://archive.example/debian-security bookworm-security main\n"
        "http://archive.example/debian bookworm contrib\n"
        "http://archive.example/debian bookworm main\n"
    )
    assert images.pick_archive(listed) == "http://archive.example/debian"
    assert images.pick_archive("https://example.org/apt noble main\n") is None


def test_make_installs_every_package_that_the_lab_checks() -> None:
    lines = (Path(doctor.__file__).parent / "system-packages.txt").read_text().splitlines()
    packages = {line for line in lines if line and not line.startswith("#")}
    needed = {*REQUIRED_PACKAGES.values(), *REQUIRED_FILES.values()}
    needed |= {check.remedy.removeprefix("apt-get install ") for check in doctor.checks() if "apt-get" in check.remedy}
    assert {word for words in needed for word in words.split()} - {"apt-get", "install"} <= packages


def test_the_extra_comes_from_the_checkout_and_needs_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(doctor, "_HEADERS", dict.fromkeys(("libvirt-dev", "python3-dev"), tmp_path / "none.h"))
    remedies = {check.name: check.remedy for check in doctor.checks()}
    for name in ("libvirt-python", "sushy-tools"):
        assert remedies[name] == "in the checkout of gpunodes: pipx install --force '.[lab]'"
    assert (remedies["libvirt-dev"], remedies["python3-dev"]) == (
        "apt-get install libvirt-dev",
        "apt-get install python3-dev",
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert not {"libvirt-dev", "python3-dev"} & {check.name for check in doctor.checks()}


def test_everything_missing_is_reported_at_once() -> None:
    found = [
        doctor.HostCheck("qemu", False, "missing", "apt-get install qemu-system-x86"),
        doctor.HostCheck("ip", False, "missing", "apt-get install iproute2"),
        doctor.HostCheck("root", False, "user id 7", "run it as root"),
        doctor.HostCheck("ssh", True, "/usr/bin/ssh", "apt-get install openssh-client"),
    ]
    with pytest.raises(WrongInput) as error:
        doctor.require(found)
    assert "qemu (missing), ip (missing), root (user id 7)" in error.value.problem.found
    assert error.value.problem.remedy == "run it as root; apt-get install qemu-system-x86 iproute2"
    doctor.require(found[-1:])


def test_the_inventory_has_ordinary_groups_and_variables() -> None:
    files = inventory.texts(LAYOUT, record(), {"gpunodes_image_mirrors": {}})
    groups = yaml.safe_load(files["hosts.yml"])["all"]["children"]
    worker = groups["workers"]["hosts"]["worker-2"]
    assert worker["ansible_host"] == "10.213.0.22"
    assert worker["gpunodes_bmc_address"].startswith("http://10.213.0.1:")
    assert {name for name in worker if not name.startswith("gpunodes_bmc_")} == {"ansible_host"}
    assert list(groups["control_plane"]["hosts"]) == ["control-1"]
    variables = yaml.safe_load(files["group_vars/all.yml"])
    assert variables["gpunodes_kubeadm_timeouts"]["kubernetesAPICall"] == "10m0s"
    fast = inventory.texts(LAYOUT, record(accelerator="kvm"), {})
    assert not yaml.safe_load(fast["group_vars/all.yml"])


def test_the_inventory_and_its_folder_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "inventory"
    written = inventory.write(folder, inventory.texts(LAYOUT, record(), {}), Owner.current())
    inventory.check_free(folder, "lab")
    with pytest.raises(WrongInput, match="lab 'two' did not make it"):
        inventory.check_free(folder, "two")
    assert inventory.remove(written) == []
    assert not folder.exists()


def test_files_that_the_user_changed_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "inventory"
    written = inventory.write(folder, inventory.texts(LAYOUT, record(), {}), Owner.current())
    (folder / "host_vars").mkdir()
    with (folder / "hosts.yml").open("a") as file:
        file.write("# mine\n")
    assert inventory.remove(written) == [folder / "hosts.yml"]
    assert sorted(path.name for path in folder.iterdir()) == ["host_vars", "hosts.yml"]


@pytest.mark.parametrize("name", ["hosts.yml", "group_vars/all.yml"])
def test_another_inventory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / name).write_text("all: {}\n")
    with pytest.raises(WrongInput, match="did not make it"):
        inventory.check_free(tmp_path, "lab")


@pytest.mark.parametrize(
    ("options", "standin"),
    [((), False), (("--docker",), True), (("--gpu-workers", "1"), True), (("--docker", "--no-mirror"), False)],
)
def test_docker_is_in_labs_that_ask_for_it_and_in_those_with_gpus(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], standin: bool
) -> None:
    asked: list[LabRequest] = []

    def up(_: Layout, request: LabRequest, __: object) -> None:
        asked.append(request)
        raise WrongInput("enough", "", "")

    monkeypatch.setattr(lab, "up", up)
    CliRunner().invoke(cli_lab.command, ["up", *options])
    assert [each.standin for each in asked] == [standin]
