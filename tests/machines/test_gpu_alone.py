"""GPU software on machines outside of a cluster, and its removal; with a reboot where the driver needs one.

First on a GPU host: Docker with GPUs for people, without a control plane in the inventory, named by its address.

The GPUs are the lab's stand-ins; the kernel's own driver, which does not release them, is a stand-in as well.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from gpunodes.inventory import Inventory

from .conftest import BARE, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--cpus", "2", "--data-disk"))
INSTALL = ("gpu", "install", "gpu-1", "--driver", "580")
# Like the real module it is loaded at every boot, for any GPU; like one with a console it cannot be unloaded.
NOUVEAU = """
#include <linux/module.h>
static int __init nouveau_init(void) { __module_get(THIS_MODULE); return 0; }
static void __exit nouveau_exit(void) { }
module_init(nouveau_init);
module_exit(nouveau_exit);
MODULE_ALIAS("pci:v000010DEd*sv*sd*bc03sc*i*");
MODULE_LICENSE("GPL");
"""
BUILD = """
set -e
kernel=$(uname -r)
make -sC /lib/modules/$kernel/build M=/root/nouveau modules >/dev/null
folder=/lib/modules/$kernel/kernel/drivers/gpu/drm/nouveau
mkdir -p $folder
cp /root/nouveau/nouveau.ko $folder
depmod
modprobe nouveau
"""
LOADED = "ls /sys/module | grep -xE 'nouveau|nvidia'"
BOOT = "cat /proc/sys/kernel/random/boot_id"

_bare: list[str] = []


IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
GPUS = f"docker run --rm --gpus all --entrypoint nvidia-smi {IMAGE} -L"
SCAN = '-c "test -e /dev/nvidia0 && echo present || echo none"'
USERS = ("alice", "bob")
MEMBERS = "getent group docker | cut -d: -f4"
LOCKED = "ls /run/gpunodes-cluster.lock"


def _docker_host(operator: Operator) -> tuple[str, Path]:
    """The address of the lab's GPU machine, and an inventory of its own that does not exist yet."""
    machine = Inventory(operator.folder / "inventory" / "hosts.yml").select(["gpu-1"])[0]
    return machine.address, operator.folder / "docker" / "hosts.yml"


def _host_settings(operator: Operator, users: Sequence[str]) -> None:
    """The lab's settings, and users of Docker, for the inventory of the GPU host."""
    folder = operator.folder / "docker" / "group_vars"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (operator.folder / "inventory" / "group_vars").glob("*.yml"):
        shutil.copy(file, folder)
    given = {"gpunodes_docker_users": list(users), "gpunodes_data_directory": "/data"}
    (folder / "gpu_hosts.yml").write_text(yaml.safe_dump(given))


def _connection(operator: Operator) -> tuple[str, ...]:
    """--user, --key and --port as the lab's inventory has them."""
    inventory = Inventory(operator.folder / "inventory" / "hosts.yml")
    found = inventory.connection("gpu-1")
    names = {"ansible_user": "--user", "ansible_ssh_private_key_file": "--key", "ansible_port": "--port"}
    return tuple(word for name, option in names.items() if name in found for word in (option, str(found[name])))


def test_docker_with_gpus_is_installed_by_address_without_a_control_plane(operator: Operator) -> None:
    for user in USERS:
        operator.ssh("gpu-1", f"useradd --create-home {user}")
    _bare.extend(lines(operator.ssh("gpu-1", BARE)))
    address, inventory = _docker_host(operator)
    _host_settings(operator, USERS)
    command = ("gpu", "install", "-i", str(inventory), "--runtime", "docker", "--driver", "580")
    operator.gpunodes(*command, address, *_connection(operator), limit_s=3000)
    assert list(yaml.safe_load(inventory.read_text())) == ["gpu_hosts"]
    assert operator.ssh("gpu-1", MEMBERS).strip().split(",") == list(USERS)
    assert operator.ssh("gpu-1", LOCKED, code=None) == "", "the lock is released"
    for data in ("/var/lib/docker", "/var/lib/containerd"):
        assert operator.ssh("gpu-1", f"findmnt -no SOURCE --target {data}").startswith("/dev/vdb"), data
    # A second run changes nothing.
    before = operator.ssh("gpu-1", STATE, code=None)
    [machine] = operator.document(*command, "gpu_hosts")["machines"]
    assert machine["outcome"] == "unchanged"
    assert operator.ssh("gpu-1", STATE, code=None) == before


def test_a_user_runs_containers_with_gpus(operator: Operator) -> None:
    assert operator.ssh("gpu-1", f"su - alice -c {shlex.quote(GPUS)}").count("UUID: GPU-") == 2
    for option, found in (("--gpus all", "present"), ("--device nvidia.com/gpu=all", "present"), ("", "none")):
        assert operator.ssh("gpu-1", f"docker run --rm {option} --entrypoint sh {IMAGE} {SCAN}").split() == [found]
    # A variable alone gives no GPU, also to an image that sets it by itself.
    variable = f"docker run --rm -e NVIDIA_VISIBLE_DEVICES=all --entrypoint sh {IMAGE} {SCAN}"
    assert operator.ssh("gpu-1", variable).split() == ["none"]


def test_a_docker_host_is_verified_and_reported(operator: Operator) -> None:
    _, inventory = _docker_host(operator)
    [machine] = operator.document("gpu", "verify", "-i", str(inventory))["machines"]
    found = {level["level"]: (level["state"], level["fact"]) for level in machine["levels"]}
    assert found["host"][0] == "ok"
    assert found["container"] == ("ok", "a container of docker sees 2 GPUs")
    done = operator.gpunodes("status", "-i", str(inventory), code=2)
    assert "only GPU hosts" in done.stderr
    operator.gpunodes("health", "-i", str(inventory))
    for command in (("join", "all"), ("up",)):
        operator.gpunodes(*command, "-i", str(inventory), code=2)


def test_a_user_who_is_no_longer_listed_is_removed_from_the_group(operator: Operator) -> None:
    _, inventory = _docker_host(operator)
    _host_settings(operator, USERS[:1])
    operator.gpunodes("gpu", "install", "gpu_hosts", "-i", str(inventory), "--driver", "580")
    assert operator.ssh("gpu-1", MEMBERS).strip().split(",") == [USERS[0]]
    operator.ssh("gpu-1", f"su - {USERS[1]} -c {shlex.quote('docker ps')}", code=1)


def test_gpu_remove_keeps_docker(operator: Operator) -> None:
    _, inventory = _docker_host(operator)
    operator.gpunodes("gpu", "remove", "--yes", "gpu_hosts", "-i", str(inventory))
    assert operator.ssh("gpu-1", LOADED, code=None).split() == []
    run = f"docker run --rm --entrypoint sh {IMAGE} {SCAN}"
    assert operator.ssh("gpu-1", f"su - alice -c {shlex.quote(run)}").split() == ["none"]


def test_reset_leaves_nothing_of_docker(operator: Operator) -> None:
    """Also a network that a user made, and a running container."""
    _, inventory = _docker_host(operator)
    operator.ssh("gpu-1", f"docker network create own && docker run -d --network own --entrypoint sleep {IMAGE} 1d")
    operator.gpunodes("reset", "--yes", "gpu_hosts", "-i", str(inventory))
    assert lines(operator.ssh("gpu-1", BARE)) == _bare
    assert operator.ssh("gpu-1", "ls -d /var/lib/docker /run/docker /sys/class/net/docker0", code=None) == ""
    assert operator.ssh("gpu-1", "ls -A /data").split() == ["lost+found"]
    assert operator.ssh("gpu-1", "iptables-save | grep ':FORWARD DROP'", code=None) == ""


def test_a_bare_machine_gets_its_gpu_software(operator: Operator) -> None:
    operator.gpunodes(*INSTALL)
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    assert machine["gpus"] == 2
    assert machine["levels"][0]["level"] == "host"
    assert {level["state"] for level in machine["levels"]} <= {"ok", "skipped"}
    assert operator.ssh("gpu-1", "nvidia-smi -L").count("UUID: GPU-") == 2


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("gpu-1", STATE, code=None)
    assert [machine["outcome"] for machine in operator.document(*INSTALL)["machines"]] == ["unchanged"]
    assert operator.ssh("gpu-1", STATE, code=None) == before


def test_removal_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "--yes", "gpu-1")
    assert lines(operator.ssh("gpu-1", BARE)) == _bare


def test_no_reboot_reports_that_a_reboot_is_needed(operator: Operator) -> None:
    """The kernel's own driver holds the GPUs: NVIDIA's is loaded after a reboot only."""
    tools = (
        "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qqy install gcc make linux-headers-$(uname -r)"
    )
    operator.ssh("gpu-1", f"{{ {tools}; }} >/dev/null")
    source = f"mkdir -p /root/nouveau; echo 'obj-m := nouveau.o' >/root/nouveau/Makefile; echo '{NOUVEAU}'"
    operator.ssh("gpu-1", f"{source} >/root/nouveau/nouveau.c")
    operator.ssh("gpu-1", BUILD)
    before = operator.ssh("gpu-1", BOOT)
    done = operator.gpunodes(*INSTALL, "--no-reboot", code=1, limit_s=3000)
    assert "nouveau uses the GPU and cannot be unloaded" in done.stdout + done.stderr
    assert "a reboot is required" in done.stdout + done.stderr
    assert operator.ssh("gpu-1", BOOT) == before
    assert operator.ssh("gpu-1", LOADED).split() == ["nouveau"]


def test_a_machine_is_rebooted_when_the_driver_needs_it(operator: Operator) -> None:
    before = operator.ssh("gpu-1", BOOT)
    operator.gpunodes(*INSTALL, limit_s=3000)
    assert operator.ssh("gpu-1", BOOT) != before
    assert operator.ssh("gpu-1", LOADED).split() == ["nvidia"]
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    assert (machine["levels"][0]["level"], machine["levels"][0]["state"]) == ("host", "ok")
    # A second run needs no reboot.
    before = operator.ssh("gpu-1", BOOT)
    assert [machine["outcome"] for machine in operator.document(*INSTALL)["machines"]] == ["unchanged"]
    assert operator.ssh("gpu-1", BOOT) == before


def test_removal_gives_the_gpus_back_to_the_kernels_driver(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "--yes", "gpu-1")
    assert operator.ssh("gpu-1", LOADED).split() == ["nouveau"]


def test_init_master_plans_a_control_plane_with_gpus(operator: Operator) -> None:
    """GPU software on a control plane needs `up`, or `gpu install` afterwards."""
    inventory = operator.folder / "inventory" / "hosts.yml"
    inventory.write_text(
        inventory.read_text().replace("control_plane:", "elsewhere:").replace("    workers:", "    control_plane:", 1)
    )
    done = operator.gpunodes("init-master", "gpu-1", "--dry-run", "--skip-phase", "preflight")
    assert "would change" in done.stdout
