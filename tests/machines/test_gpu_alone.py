"""GPU software on a machine that is in no cluster, and off it again. The GPUs are the lab's stand-ins."""

from __future__ import annotations

from .conftest import BARE, STATE, Kind, Operator, lines

LAB = Kind("debian13", workers=0, gpu_workers=1, more=("--cpus", "2"))
INSTALL = ("gpu", "install", "gpu-1", "--driver", "580")

_bare: list[str] = []


def test_a_machine_that_was_never_prepared_gets_its_software(operator: Operator) -> None:
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
    operator.gpunodes("gpu", "remove", "gpu-1")
    assert lines(operator.ssh("gpu-1", BARE)) == _bare


def test_init_master_plans_a_control_plane_with_gpus(operator: Operator) -> None:
    """Its GPUs are for `up`, or `gpu install` after it."""
    inventory = operator.folder / "inventory" / "hosts.yml"
    inventory.write_text(
        inventory.read_text().replace("control_plane:", "elsewhere:").replace("    workers:", "    control_plane:", 1)
    )
    done = operator.gpunodes("init-master", "gpu-1", "--dry-run", "--skip-phase", "preflight")
    assert "would change" in done.stdout
