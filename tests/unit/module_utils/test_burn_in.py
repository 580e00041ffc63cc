"""Burn-in: what its tools report, and the tools as small programs in place of DCGM, which needs GPUs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import burn_in, burn_in_results, gpu_verify, process
from gpunodes.ansible.module_utils.burn_in_results import FAILED, PASSED, SKIPPED
from gpunodes.ansible.module_utils.problem import MachineProblem

# The shapes that dcgmi writes: DCGM 4 (dcgmi/Diag.cpp of 4.6), 3.3 (of 3.3.9) and 3.1.
DCGM_4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Deployment",
                "tests": [
                    {
                        "name": "software",
                        "results": [{"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"}],
                        "test_summary": {"status": "Pass"},
                    }
                ],
            },
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "memory",
                        "results": [
                            {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"},
                            {
                                "entity_group": "GPU",
                                "entity_group_id": 1,
                                "entity_id": 3,
                                "status": "Fail",
                                "warnings": [
                                    {"warning": "GPU 3: a DBE was\n found", "error_id": 1, "error_severity": 6}
                                ],
                            },
                        ],
                        "test_summary": {"status": "Fail", "warnings": [{"warning": "GPU 3: a DBE was found"}]},
                    },
                    {"name": "pulse_test", "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Skip"}]},
                    {"name": "cpu_eud", "results": [{"entity_group": "CPU", "entity_id": 1, "status": "Fail"}]},
                    {"name": "pcie", "test_summary": {"status": "Fail", "warnings": [{"warning": "no link"}]}},
                ],
            },
        ]
    },
    "entity_groups": [],
    "metadata": {"version": "4.6.0", "Driver Version Detected": "580.65.06"},
}
DCGM_3_3 = {
    "DCGM GPU Diagnostic": {
        "version": "3.3.9",
        "test_categories": [
            {
                "category": "Deployment",
                "tests": [
                    None,
                    {
                        "name": "Persistence Mode",
                        "results": [{"gpu_id": 2, "status": "Fail", "warnings": [None, {"warnings": "is disabled"}]}],
                    },
                ],
            },
            {"category": "Stress", "tests": [{"name": "SM Stress", "results": [{"gpu_id": "0", "status": "Pass"}]}]},
        ],
    }
}
DCGM_3_1 = {
    "DCGM GPU Diagnostic": {
        "version": "3.1.8",
        "test_categories": [
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "GPU Memory",
                        "results": [
                            {"gpu_ids": "0,1", "status": "PASS"},
                            {"gpu_ids": "2", "status": "FAIL", "warnings": ["it failed"], "info": ["x"]},
                            {"gpu_ids": "3", "status": "WARN", "warnings": "almost"},
                        ],
                    }
                ],
            }
        ],
    }
}
DISCOVERY = """\
2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: NVIDIA A40                                                     |
|        | PCI Bus ID: 00000000:3B:00.0                                         |
|        | Device UUID: GPU-34bf77d1-c686-6821-79a8-32d326c5039c                |
+--------+----------------------------------------------------------------------+
| 3      | Name: NVIDIA A40                                                     |
|        | PCI Bus ID: 00000001:5E:00.0                                         |
+--------+----------------------------------------------------------------------+
0 NvSwitches found.
"""


def failures(document: Any, addresses: dict[str, str] | None = None) -> list[str]:
    found = burn_in_results.diagnosis(f"a line before\n{json.dumps(document)}\n", addresses or {})
    assert not found.error
    return [str(each) for each in found.results if each.state == FAILED]


def test_addresses_of_gpus() -> None:
    assert burn_in_results.addresses(DISCOVERY) == {"0": "0000:3b:00.0", "3": "0001:5e:00.0"}
    assert burn_in_results.addresses("Error: unable to establish a connection") == {}


def test_dcgm_4_names_the_test_and_the_gpu() -> None:
    assert failures(DCGM_4, {"3": "0001:5e:00.0"}) == [
        "memory on GPU 3 (0001:5e:00.0): GPU 3: a DBE was found",
        "cpu_eud on CPU 1: failed",
        "pcie: no link",
    ]
    found = burn_in_results.diagnosis(json.dumps(DCGM_4), {})
    assert found.version == "4.6.0"
    assert burn_in_results.summary(found.results) == "1 tests passed, skipped: pulse_test"


def test_dcgm_3() -> None:
    assert failures(DCGM_3_3) == ["Persistence Mode on GPU 2: is disabled"]
    assert failures(DCGM_3_1) == ["GPU Memory on GPU 2: it failed", "GPU Memory on GPU 3: almost"]


@pytest.mark.parametrize(
    ("state", "wanted"), [("Pass", PASSED), ("Skip", SKIPPED), ("Not Run", SKIPPED), ("??", FAILED)]
)
def test_only_a_pass_is_a_pass(state: str, wanted: str) -> None:
    tests = [{"name": "x", "results": [{"entity_id": 0, "status": state}]}]
    document = {"DCGM Diagnostic": {"test_categories": [{"category": "c", "tests": tests}]}}
    assert [each.state for each in burn_in_results.diagnosis(json.dumps(document), {}).results] == [wanted]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Error: unable to establish a connection to the specified host: localhost\n", "Error: unable to establish"),
        ("", "it printed nothing"),
        ("{" * 100_000, "{{{"),
        ("[]", "[]"),
        ('{"DCGM Diagnostic": {"version": "4", "runtime_error": "Error:\\u001b[2J paused"}}', "Error:[2J paused"),
        ('{"DCGM Diagnostic": []}', "it reports no test"),
        ('{"DCGM Diagnostic": {"test_categories": [{"tests": {"name": 1}}, 7, null]}}', "it reports no test"),
        ('{"metadata": 5}', "it reports no test"),
    ],
)
def test_an_output_without_results_is_no_pass(text: str, error: str) -> None:
    found = burn_in_results.diagnosis(text, {})
    assert not found.results
    assert found.error.startswith(error)
    assert len(found.error) <= 300


def test_a_hostile_report_stays_one_short_line() -> None:
    name = "\x1b]0;x\x07" + "{{ 1 }}" * 500
    tests = [{"name": name, "results": [{"entity_id": name, "status": "Fail", "warnings": [{"warning": "a\nb"}]}]}]
    (text,) = failures({"DCGM Diagnostic": {"test_categories": [{"tests": tests * 1}]}})
    assert text.isprintable()
    assert len(text) <= 300
    many = {"DCGM Diagnostic": {"test_categories": [{"tests": tests * 9}]}}
    found = burn_in_results.diagnosis(json.dumps(many), {})
    assert burn_in_results.failure(found.results).endswith(", and 6 more")


NCCL = """\
# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 4294967296
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
  1073741824     268435456     float     sum      -1   9000.1  119.30  223.69      0   9000.2  119.30  223.69      0
# Out of bounds values : {} OK
# Avg bus bandwidth    : {} OK
#
"""


@pytest.mark.parametrize(("text", "wanted"), [("223.69", 223.69), ("1.5e+03", 1500.0), ("7", 7.0), ("2e-05", 2e-05)])
def test_bandwidth(text: str, wanted: float) -> None:
    assert burn_in_results.bandwidth(NCCL.format(0, text)) == burn_in_results.Bandwidth(wanted, 0)
    assert burn_in_results.bandwidth(NCCL.format(0, "nan")) is None
    assert burn_in_results.bandwidth("ssh: connect to host") is None
    assert burn_in_results.bandwidth(NCCL.format(3, "1")) == burn_in_results.Bandwidth(1.0, 3)


def test_xids_during_the_test() -> None:
    log = "NVRM: Xid (PCI:0000:3B:00): 63, pid=1\nNVRM: Xid (PCI:0000:3B:00): 63, pid=2\nNVRM: loading\n"
    assert [str(each) for each in burn_in_results.xids(log.split("\n"))] == [
        "kernel log on GPU 0000:3b:00: Xid 63 during the burn-in"
    ]


# --- programs in place of DCGM and nvidia-smi ------------------------------------------------------------------------

SMI = """<nvidia_smi_log><driver_version>580.65.06</driver_version>
<gpu id="00000000:3B:00.0"><uuid>GPU-1</uuid><processes>{}</processes></gpu>
<gpu id="00000000:5E:00.0"><uuid>GPU-2</uuid></gpu></nvidia_smi_log>"""
USER = "<process_info><pid>77</pid><type>{}</type><process_name>python</process_name></process_info>"
ENGINE = "test -e {folder}/engine && cat {folder}/discovery || {{ echo unable to connect; exit 255; }}"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only programs of the machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = f"{folder}:/usr/bin:/bin"
    for module in (burn_in, gpu_verify, process):
        monkeypatch.setattr(module, "PATH", path)
    monkeypatch.setattr(gpu_verify, "_stuck", lambda: "")
    # pytest reads this process's output, not a controller.
    monkeypatch.setattr(process, "is_disconnected", lambda: False)
    (tmp_path / "discovery").write_text(DISCOVERY)
    write(folder, "nvidia-smi", f"cat {tmp_path}/smi")
    (tmp_path / "smi").write_text(SMI.format(""))
    monkeypatch.setattr(burn_in, "ROOT", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text("6,1,1000000,-;usb\n")
    (tmp_path / "usr/bin").mkdir(parents=True)
    return folder


def write(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def dcgmi(folder: Path, document: Any, script: str = "") -> None:
    """A dcgmi whose host engine runs where the file `engine` exists."""
    (folder.parent / "diag").write_text(json.dumps(document))
    discovery = ENGINE.format(folder=folder.parent)
    diag = script or f"cat {folder.parent}/diag; exit 2"
    write(
        folder, "dcgmi", f'case "$1" in discovery) {discovery};; diag) echo "$@" > {folder.parent}/argv; {diag};; esac'
    )


def test_dcgm_finds_a_broken_gpu(programs: Path) -> None:
    (programs.parent / "engine").touch()
    dcgmi(programs, DCGM_4)
    found = burn_in.burn_in(2, "containerd", "", [])
    assert (programs.parent / "argv").read_text().split() == ["diag", "-r", "2", "-j"]
    assert found["failed"].startswith("DCGM 4.6.0 diagnostics, level 2: memory on GPU 3 (0001:5e:00.0): GPU 3: a DBE")
    assert not found["refused"]


def test_xids_fail_a_burn_in_that_dcgm_passes(programs: Path) -> None:
    (programs.parent / "engine").touch()
    tests = [{"name": "memory", "results": [{"entity_id": 0, "status": "Pass"}]}]
    report = {"DCGM Diagnostic": {"test_categories": [{"tests": tests}]}}
    dcgmi(programs, report)
    assert burn_in.burn_in(1, "containerd", "", [])["failed"].endswith("dcgmi: exit code 2, although no test failed")
    dcgmi(programs, report, f"cat {programs.parent}/diag")
    assert not burn_in.burn_in(1, "containerd", "", [])["failed"]
    # Those of before the test do not count.
    kernel_writes(programs, f"3,2,2000000,-;{XID}")
    assert not burn_in.burn_in(1, "containerd", "", [])["failed"]
    dcgmi(programs, report, f"cat {programs.parent}/during >> {programs.parent}/dev/kmsg; cat {programs.parent}/diag")
    (programs.parent / "during").write_text(f"3,3,3000000,-;{XID}\n")
    assert "kernel log on GPU 0000:3b:00: Xid 63" in burn_in.burn_in(1, "containerd", "", [])["failed"]


XID = "NVRM: Xid (PCI:0000:3b:00): 63, pid=1"
SEGFAULT = "x[7]: segfault at 0 ip 0 sp 0 error 4 in "


def kernel_writes(programs: Path, *records: str) -> None:
    with (programs.parent / "dev/kmsg").open("a") as file:
        file.writelines(f"{record}\n" for record in records)


def passing(programs: Path, script: str) -> None:
    """A dcgmi whose test passes; the script runs during the test."""
    (programs.parent / "engine").touch()
    tests = [{"name": "memory", "results": [{"entity_id": 0, "status": "Pass"}]}]
    report = {"DCGM Diagnostic": {"test_categories": [{"tests": tests}]}}
    dcgmi(programs, report, f"{script}; cat {programs.parent}/diag")


def test_a_program_with_the_name_of_an_xid_fails_no_burn_in(programs: Path) -> None:
    """The kernel writes the file name of a program that crashes; user space writes with another facility."""
    folder = programs.parent
    lines = (f"6,7,7000000,-;{SEGFAULT}{XID}[1000]", rf"6,8,8000000,-;{SEGFAULT}\x0a{XID}", f"12,9,9000000,-;{XID}")
    (folder / "during").write_text("".join(f"{line}\n" for line in lines))
    passing(programs, f"cat {folder}/during >> {folder}/dev/kmsg")
    assert not burn_in.burn_in(1, "containerd", "", [])["failed"]
    # The journal has the lines that the ring buffer has lost; it indents further lines of a message.
    write(folder / "usr/bin", "journalctl", f"cat {folder}/journal")
    journal = [f"[    9.100000] h kernel: {SEGFAULT}{XID}", f"[    9.200000] h kernel: {SEGFAULT}", f"       {XID}"]
    (folder / "journal").write_text("".join(f"{line}\n" for line in journal))
    passing(programs, f"echo '6,99,9900000,-;usb' > {folder}/dev/kmsg")
    assert not burn_in.burn_in(1, "containerd", "", [])["failed"]


NO_JOURNAL = {
    "not installed": "",
    "no files": "echo No journal files were found. >&2",
    "without the kernel": ":",
    "older": "echo '[    0.500000] h kernel: usb'",
    "slow": "exec sleep 60",
}


@pytest.mark.parametrize("name", NO_JOURNAL)
def test_a_kernel_log_that_is_not_read_is_no_pass(name: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = programs.parent
    monkeypatch.setattr(burn_in, "_LOG_S", 0.5)
    if name != "not installed":
        write(folder / "usr/bin", "journalctl", NO_JOURNAL[name])
    passing(programs, f"echo '6,99,9900000,-;usb' > {folder}/dev/kmsg")
    failed = burn_in.burn_in(1, "containerd", "", [])["failed"]
    assert "kernel log: not read, so Xids are unknown: the ring buffer has lost lines of the test" in failed
    write(folder / "usr/bin", "journalctl", f"echo '[   20.000000] h kernel: {XID}'")
    passing(programs, f"echo '6,999,99000000,-;usb' > {folder}/dev/kmsg")
    assert "kernel log on GPU 0000:3b:00: Xid 63" in burn_in.burn_in(1, "containerd", "", [])["failed"]
    (folder / "dev/kmsg").unlink()
    failed = burn_in.burn_in(1, "containerd", "", [])["failed"]
    assert failed.endswith("Xids are unknown: /dev/kmsg: No such file or directory")


def only(folder: Path, *names: str) -> Path:
    """A folder with these programs of this machine."""
    (folder / "only").mkdir()
    for name in names:
        (folder / "only" / name).symlink_to(f"/usr/bin/{name}")
    return folder / "only"


def test_a_host_engine_is_started_for_the_test_only(programs: Path) -> None:
    dcgmi(programs, DCGM_4)
    write(programs, "nv-hostengine", f"echo $$ > {programs.parent}/engine; exec sleep 60")
    assert burn_in.burn_in(1, "containerd", "", [])["failed"]
    pid = int((programs.parent / "engine").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_host_engine_that_does_not_respond_is_reported(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcgmi(programs, DCGM_4)
    with pytest.raises(
        MachineProblem, match=r"host engine does not respond: unable to connect.*enable --now nvidia-dcgm"
    ):
        burn_in.burn_in(1, "containerd", "", [])
    monkeypatch.setattr(burn_in, "_ENGINE_S", 1)
    write(programs, "nv-hostengine", "exec sleep 60")
    with pytest.raises(MachineProblem, match="host engine does not respond"):
        burn_in.burn_in(1, "containerd", "", [])


def test_dcgmi_that_does_not_end_gets_a_signal_first(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs.parent / "engine").touch()
    dcgmi(programs, {}, f"trap 'touch {programs.parent}/stopped; exit 0' TERM; sleep 60 & wait")
    monkeypatch.setattr(burn_in, "DIAG_LIMITS_S", {1: 0.5})
    monkeypatch.setattr(burn_in, "_STOP_S", 10)
    begun = time.monotonic()
    with pytest.raises(MachineProblem, match="gave no result: dcgmi did not end within"):
        burn_in.burn_in(1, "containerd", "", [])
    assert (programs.parent / "stopped").exists()
    assert time.monotonic() - begun < 8


def test_a_controller_that_disconnects_ends_the_test(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs.parent / "engine").touch()
    dcgmi(programs, {}, f"trap 'touch {programs.parent}/stopped; exit 0' TERM; sleep 60 & wait")
    begun = time.monotonic()
    monkeypatch.setattr(process, "is_disconnected", lambda: time.monotonic() - begun > 1)
    with pytest.raises(MachineProblem):
        burn_in.burn_in(1, "containerd", "", [])
    assert (programs.parent / "stopped").exists()
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize(("kind", "refused"), [("C", True), ("C+G", True), ("G", False)])
def test_gpus_in_use_are_refused(kind: str, refused: bool, programs: Path) -> None:
    (programs.parent / "engine").touch()
    (programs.parent / "smi").write_text(SMI.format(USER.format(kind)))
    dcgmi(programs, DCGM_4)
    found = burn_in.burn_in(1, "containerd", "", [])
    wanted = "python (process 77) uses GPU 0 (0000:3b:00.0); wanted: idle GPUs" if refused else ""
    assert found["refused"].startswith(wanted)
    assert bool(found["refused"]) == refused
    assert (programs.parent / "argv").exists() != refused


def test_a_machine_without_dcgm_runs_a_cuda_program_on_each_gpu(programs: Path) -> None:
    write(
        programs,
        "docker",
        f'echo "$@" >> {programs.parent}/docker;'
        'case "$*" in *gpu=1*) echo CUDA error: an illegal address >&2; exit 1;; esac',
    )
    found = burn_in.burn_in(3, "docker", "cuda:1", ["nbody", "-i=1"])
    assert found["failed"] == (
        "CUDA program (only whether each GPU computes; no DCGM): CUDA program on GPU 1 (0000:5e:00.0): exit code 1:"
        " CUDA error: an illegal address"
    )
    calls = (programs.parent / "docker").read_text().splitlines()
    runs = sorted(line for line in calls if line.startswith("run"))
    assert runs == [
        f"run --rm --name=gpunodes-burn-in-{n} --device=nvidia.com/gpu={n} cuda:1 nbody -i=1" for n in (0, 1)
    ]
    # Containers of an interrupted run are removed first.
    assert calls.count("rm --force gpunodes-burn-in-0") == 1


def test_an_image_that_cannot_be_pulled_shows_its_first_cause(programs: Path) -> None:
    reason = "429 Too Many Requests (toomanyrequests: slow down)"
    write(programs, "docker", f"test $1 = image || {{ echo '{reason}'; echo 'see the manual'; }} >&2; exit 1")
    with pytest.raises(MachineProblem) as raised:
        burn_in.burn_in(3, "docker", "cuda:1", ["nbody"])
    assert raised.value.problem.found == "the image cuda:1 cannot be pulled: 429 Too Many Requests"
    assert "the registry limits pulls" in raised.value.problem.remedy
    assert raised.value.problem.remedy.endswith("; or install DCGM")


@pytest.mark.parametrize(
    ("runtime", "image", "found"),
    [
        ("docker", "", "dcgmi is not installed, and gpunodes_burn_in_image is empty"),
        ("docker", "cuda:1", "neither dcgmi nor docker is installed"),
    ],
)
def test_nothing_to_test_with_is_no_pass(
    runtime: str, image: str, found: str, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burn_in, "PATH", str(programs))
    with pytest.raises(MachineProblem, match=found):
        burn_in.burn_in(3, runtime, image, [])


def test_no_gpu_is_no_pass(programs: Path) -> None:
    (programs.parent / "smi").write_text("no XML")
    with pytest.raises(MachineProblem, match="lists no GPU"):
        burn_in.burn_in(3, "containerd", "", [])
