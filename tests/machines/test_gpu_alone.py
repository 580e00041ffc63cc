"""GPU software on a machine outside of a cluster, and its removal; with a reboot where the driver needs one.

The GPUs are the lab's stand-ins; the kernel's own driver, which does not release them, is a stand-in as well.
"""

from __future__ import annotations

from .conftest import BARE, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--cpus", "2"))
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


def test_a_bare_machine_gets_its_gpu_software(operator: Operator) -> None:
    _bare.extend(lines(operator.ssh("gpu-1", BARE)))
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
