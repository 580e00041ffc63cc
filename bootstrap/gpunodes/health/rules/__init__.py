"""The table of all health rules; each one turns the data of a machine into findings.

The files of this folder have the checks, one file per family; a check has the name of its rule. The action for a single
Xid is a row of tables/xid.tsv. ``gpunodes health rules`` and the table in docs/health.md are generated from `RULES`.
"""

from __future__ import annotations

from gpunodes.ansible.module_utils.probe.known import STUCK_S
from gpunodes.health.model import Finding
from gpunodes.health.rules import clocks, driver, fabric, hung, memory, nvidia_smi, pcie, quotation, xid
from gpunodes.health.rules.rule import Rule, RuleInput

CATALOG = "NVIDIA Xid catalog, docs.nvidia.com/deploy/xid-errors"
FABRIC_GUIDE = "NVIDIA Fabric Manager user guide, appendix D"
NVRM = "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia"
SMI = "nvidia-smi(1); NVML API reference"
MEMORY = "NVIDIA GPU memory error management, docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt"
HUNG_TASK = "Linux kernel/hung_task.c; a GPU reset needs every client of the GPU to exit, and a stuck one cannot"
AER = "Linux Documentation/PCI/pcieaer-howto.rst"


RULES: tuple[Rule, ...] = (
    Rule(
        "hung-in-driver",
        "A task hangs in the NVIDIA driver",
        "the kernel's report of a hung task, of the owner of what it waits for, or of a task that does not freeze:"
        " an nvidia module's frame in its stack, or a thread of the kernel with a name of the driver's",
        "reboot; watch if a live machine's log has the name without a stack, or the thread sleeps no more",
        HUNG_TASK,
        hung.hung_in_driver,
    ),
    Rule(
        "task-in-driver",
        "A thread is in uninterruptible sleep in the NVIDIA driver",
        f"threads in state D that have not woken for {STUCK_S:.0f} s; the probe watches younger ones until then",
        "reboot; watch if they wake, or if gpunodes' time limit comes first",
        HUNG_TASK,
        hung.task_in_driver,
    ),
    Rule(
        "smi-stuck",
        "nvidia-smi does not finish",
        "gpunodes' own nvidia-smi after its deadline, or another one in the driver; in state D its stack shows where; "
        f"it has neither written nor woken for {hung.SMI_STILL_S:.0f} s, "
        f"or exists for {hung.SMI_SLOW_S / 60:.0f} minutes",
        "reboot; reset_gpu if it is not in state D; watch if it moved, waits for NFS, or elsewhere outside the driver",
        HUNG_TASK,
        hung.smi_stuck,
    ),
    Rule(
        "silent-hung-tasks",
        "Hung tasks that are not in the log",
        "kernel.hung_task_detect_count, and no hung task in the log (the kernel stops after hung_task_warnings)",
        "none; watch",
        "Linux Documentation/admin-guide/sysctl/kernel.rst",
        hung.silent_hung_tasks,
    ),
    Rule(
        "soft-lockup-in-driver",
        "A CPU is in a soft lockup in the NVIDIA driver",
        "the kernel's soft-lockup report, judged as that of a hung task",
        "reboot; watch if a live machine's log has the name without a stack, or no report for five minutes",
        "Linux kernel/watchdog.c",
        hung.soft_lockup_in_driver,
    ),
    Rule(
        "driver-crashed",
        "The kernel ended a task inside the NVIDIA driver",
        "an oops, judged as the report of a hung task",
        "reboot; watch if a live machine's log has the name without a stack",
        "Linux Documentation/admin-guide/bug-hunting.rst; a task that is ended does not release its locks",
        hung.driver_crashed,
    ),
    Rule(
        "fallen-off-bus",
        "A GPU has fallen off the bus",
        'Xid 79, the driver\'s "fallen off the bus" lines, nvidia-smi\'s "GPU is lost"',
        "reboot",
        CATALOG,
        xid.fallen_off_bus,
    ),
    Rule(
        "no-answer",
        "A PCI function does not respond",
        "the configuration space of an NVIDIA function reads as all ones",
        "reboot",
        "PCI Express base specification, completion without data",
        pcie.no_answer,
    ),
    Rule(
        "gpus-missing",
        "Fewer GPUs on the PCI bus than expected",
        "PCI functions compared with the setting, else with the boot log",
        "reboot",
        "the site's setting, or the machine's boot log",
        pcie.gpus_missing,
    ),
    Rule(
        "gpus-unused",
        "GPUs that are bound to the driver but do not work",
        "PCI functions bound to the driver compared with /proc/driver/nvidia and nvidia-smi",
        "reboot",
        NVRM,
        driver.gpus_unused,
    ),
    Rule(
        "xid",
        "The driver reports an error (Xid)",
        "lines `NVRM: Xid`; 48 with or without 63 and 64, 45 alone or after another, 144 to 150 by their registers",
        "the catalog's action for the code; the site can set its own",
        CATALOG,
        xid.xid,
    ),
    Rule(
        "xid-recovery",
        "The driver requests a recovery action (Xid 154)",
        "the number in the last such line of each GPU",
        "none, restart_app, reset_gpu or reboot",
        "NVIDIA open-gpu-kernel-modules, GPU recovery action",
        xid.xid_recovery,
    ),
    Rule(
        "xid-repeated",
        "The same application fault from several applications on one GPU",
        f"Xid 13 or 31 from {xid.MANY_APPS} or more processes",
        "restart_app, then field diagnostics",
        CATALOG,
        xid.xid_repeated,
    ),
    Rule(
        "sxid",
        "An NVSwitch reports an error (SXid)",
        "lines `SXid`, or Fabric Manager's `detected NVSwitch ... error`: their severity;"
        " NVIDIA's table for lines without one and for errors that stop the whole fabric",
        "none, reset_gpu or reboot; the site can set its own",
        FABRIC_GUIDE,
        fabric.sxid,
    ),
    Rule(
        "start-up-failed",
        "The driver cannot initialise a GPU",
        "`RmInitAdapter failed`, `rm_init_adapter failed`, `probe routine failed`, `request_irq() failed`, no MSI-X",
        "reboot; watch if nvidia-smi of a live machine shows the GPU",
        NVRM,
        driver.start_up_failed,
    ),
    Rule(
        "start-up-impossible",
        "The driver cannot initialise a GPU, and a reboot does not help",
        "lines about missing firmware, the wrong module flavour, or memory regions that the BIOS did not assign",
        "repair",
        NVRM,
        driver.start_up_impossible,
    ),
    Rule(
        "not-probed",
        "Another driver owns GPUs",
        "`The NVIDIA probe routine was not called`, and whether the driver found any GPU",
        "repair if another driver owns all GPUs; else none, watch",
        NVRM,
        driver.not_probed,
    ),
    Rule(
        "version-mismatch",
        "Libraries and driver have different versions",
        "`NVRM: API mismatch`; a named program with libraries older than the driver only needs a restart, and so does"
        " any program where nvidia-smi works or the machine's libraries have the driver's version",
        "reboot; none for one program",
        NVRM,
        driver.version_mismatch,
    ),
    Rule(
        "versions-differ",
        "The loaded driver is not the installed one",
        "the version of the loaded module compared with that of the libraries",
        "reboot",
        NVRM,
        driver.versions_differ,
    ),
    Rule(
        "driver-not-loaded",
        "GPUs without an NVIDIA driver",
        "PCI functions that are bound to no driver, or to nouveau",
        "repair",
        NVRM,
        driver.driver_not_loaded,
    ),
    Rule(
        "gsp-timeout",
        "The GPU System Processor (GSP) does not respond",
        "`Timeout ... waiting for RPC ... from GSP` without an Xid",
        "reset_gpu",
        NVRM,
        driver.gsp_timeout,
    ),
    Rule(
        "reset-required",
        "A GPU must be reset",
        "`NV_ERR_RESET_REQUIRED` in the log; nvidia-smi's recovery action and reset status",
        "the reported action",
        SMI,
        nvidia_smi.reset_required,
    ),
    Rule(
        "uvm-fatal",
        "Fatal error of unified memory",
        "nvidia-uvm's `Encountered a global fatal error`",
        "reset_gpu",
        "NVIDIA open-gpu-kernel-modules, kernel-open/nvidia-uvm/uvm_global.c",
        driver.uvm_fatal,
    ),
    Rule(
        "smi-message",
        "nvidia-smi fails",
        "nvidia-smi's message",
        "depends on the message: restart_app, reset_gpu, reboot or repair",
        SMI,
        nvidia_smi.smi_message,
    ),
    Rule(
        "row-missing",
        "nvidia-smi's table has no row for a GPU",
        "a gap in the numbers of a saved table, compared with `nvidia-smi -L`, other output of nvidia-smi and the"
        " addresses in the kernel log",
        "reboot if those show more GPUs than nvidia-smi; else none: `nvidia-smi -i` shows only some, too",
        SMI,
        nvidia_smi.row_missing,
    ),
    Rule(
        "unreadable",
        "nvidia-smi cannot read values of a GPU",
        "`ERR!` in its table, `Unknown Error` in its other output",
        "reboot if it reads neither name nor performance state, or three kinds of values; else reset_gpu;"
        " watch if only the fan",
        SMI,
        nvidia_smi.unreadable,
    ),
    Rule(
        "fabric-manager",
        "Fabric manager does not run on a machine with NVSwitches",
        "PCI functions of NVSwitches, the state of the service, and no process of it, which may be in a container",
        "restart_app",
        FABRIC_GUIDE,
        fabric.fabric_manager,
    ),
    Rule(
        "pcie-error",
        "PCIe errors of a GPU",
        "AER lines of an nvidia function; AER, DPC or EDR lines of the port above one that could not recover;"
        " AER counters in sysfs",
        f"reboot if fatal, else none; watch non-fatal errors, and corrected ones from {pcie.CORRECTED_MANY} on",
        AER,
        pcie.pcie_error,
    ),
    Rule(
        "link-width",
        "A PCIe link uses fewer lanes than it supports",
        "the link width in sysfs",
        "none; watch",
        AER,
        pcie.link_width,
    ),
    Rule(
        "memory",
        "Memory errors of a GPU",
        "nvidia-smi's ECC counters, remapped rows, retired pages and pending repairs",
        "reset_gpu for pending repairs and new errors; repair if the board must be replaced",
        MEMORY,
        memory.memory,
    ),
    Rule(
        "slowed",
        "The hardware slows GPUs down",
        "nvidia-smi's clock event reasons: power brake, heat, hardware slowdown",
        "none; watch",
        SMI,
        clocks.slowed,
    ),
    Rule(
        "quotation",
        "Kernel lines that another program quotes",
        "lines of the kernel inside JSON, a ticket or a program's message",
        "none",
        "Linux Documentation/ABI/testing/dev-kmsg",
        quotation.quotation,
    ),
    Rule("persistence-off", "Persistence mode is off", "nvidia-smi", "none", SMI, nvidia_smi.persistence_off),
)


def check(data: RuleInput) -> list[Finding]:
    """All findings of all rules."""
    return [finding for rule in RULES for finding in rule.check(rule, data)]
