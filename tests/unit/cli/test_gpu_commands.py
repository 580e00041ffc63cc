"""The commands `gpu plan` and `gates` as a user runs them, without machines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gpunodes.ansible.filter.general import preflight
from gpunodes.settings import defaults

from tests.command import run

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "1eb8", "subsystem": "10de:12a2", "class": "030200"}
FACTS = {
    "os": {"id": "debian", "version": "13"},
    "arch": "x86_64",
    "kernel": "6.12.48+deb13-amd64",
    "time": 1_795_000_000,
    "gpu": {"functions": [GPU], "headers": {"running": True, "package": None}},
}


def gpunodes(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(Path.cwd(), *arguments)


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"gpu-1": FACTS, "cpu-1": {**FACTS, "gpu": {"functions": []}}}))
    return path


def test_a_plan_shows_packages_reasons_and_sources(facts: Path) -> None:
    done = gpunodes("gpu", "plan", "--from", str(facts))
    assert done.returncode == 0
    for message in ("1 x Tesla T4", "nvidia-open-580", "docs.nvidia.com", "joins as a CPU node"):
        assert message in done.stdout


def test_a_plan_document_can_be_planned_again(facts: Path, tmp_path: Path) -> None:
    done = gpunodes("gpu", "plan", "gpu-*", "--from", str(facts), "--with-cuda", "13.0", "--json")
    document = json.loads(done.stdout)
    assert document["schema"] == "gpunodes.gpu-plan/1"
    assert [machine["name"] for machine in document["machines"]] == ["gpu-1"]
    assert document["machines"][0]["plan"]["branch"] == "580"
    saved = tmp_path / "saved.json"
    saved.write_text(done.stdout)
    again = gpunodes("gpu", "plan", "--from", str(saved), "--json")
    assert json.loads(again.stdout) == document


def test_the_exit_code_is_3_for_some_conflicts_and_1_for_all(facts: Path) -> None:
    some = gpunodes("gpu", "plan", "--from", str(facts), "--driver", "470")
    assert some.returncode == 3
    assert "remedy: " in some.stdout
    assert gpunodes("gpu", "plan", "gpu-1", "--from", str(facts), "--driver", "470").returncode == 1


def test_a_driver_and_a_cuda_that_no_source_has_both_are_requests_in_conflict(facts: Path) -> None:
    done = gpunodes("gpu", "plan", "gpu-1", "--from", str(facts), "--with-cuda", "12.4", "--driver", "595")
    assert done.returncode == 1
    assert "driver 595 and CUDA 12.4 are requested, and no source has both for Debian 13" in done.stdout
    assert "drop one of the two requests" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--driver", "111"), "the driver branch '111' is unknown; wanted: one of"),
        (("--with-cuda", "13.0", "--with-cuda", "99"), "CUDA 99 is unknown; wanted: one of"),
        (("--with-cudnn", "99"), "cuDNN 99 is unknown; wanted: one of"),
    ],
)
@pytest.mark.parametrize("command", [("join", "worker-*"), ("up",), ("gpu", "plan"), ("gpu", "install", "worker-*")])
def test_a_version_that_no_machine_can_have_is_wrong_input(
    command: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    # Reported before the inventory is read, and before any machine is contacted.
    done = gpunodes(*command, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"gpu-1": {}}', '{"machines": [{"name": "a"}]}', None])
def test_a_file_without_facts_is_wrong_input(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "f.json"
    if content is not None:
        path.write_text(content)
    done = gpunodes("gpu", "plan", "--from", str(path))
    assert done.returncode == 2
    assert "a bug in gpunodes" not in done.stderr
    assert done.stdout == ""


def test_a_pattern_without_match_is_wrong_input(facts: Path) -> None:
    done = gpunodes("gpu", "plan", "x-*", "--from", str(facts))
    assert (done.returncode, done.stdout) == (2, "")
    assert "gpu-1" in done.stderr


def test_gates_as_a_document() -> None:
    done = gpunodes("gates", "v1.36.2", "--json")
    document = json.loads(done.stdout)
    assert (document["schema"], document["version"]) == ("gpunodes.gates/1", "1.36")
    gate = next(gate for gate in document["gates"] if gate["name"] == "KubeletPodResourcesGet")
    assert gate.pop("why")
    assert gate == {
        "name": "KubeletPodResourcesGet",
        "status": "ga",
        "default": True,
        "locked": True,
        "removed_in": None,
        "set_by_gpunodes": None,
    }


def test_gates_as_a_table() -> None:
    done = gpunodes("gates", "1.9")
    assert done.returncode == 0
    assert "DevicePlugins" in done.stdout


@pytest.mark.parametrize("version", ["1.5", "1.99", "x", "v2.0"])
def test_gates_of_an_unknown_version_are_wrong_input(version: str) -> None:
    done = gpunodes("gates", version)
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_plain_ansible_judges_requested_software_too() -> None:
    facts = {**preflight_facts(), **FACTS}
    found = preflight(
        {"gpu-1": facts}, {"gpu-1": "worker"}, None, "1.36", {"gpu-1": defaults()}, {"gpu-1": "a"}, joins=True
    )
    assert found == []
    requested = {**defaults(), "gpunodes_feature_gates": {"Accelerators": True}, "gpunodes_cuda_versions": ["9.9"]}
    found = preflight(
        {"gpu-1": facts}, {"gpu-1": "worker"}, None, "1.36", {"gpu-1": requested}, {"gpu-1": "a"}, joins=True
    )
    assert [line.split(": ")[1] for line in found] == ["gates", "gpu"]


def preflight_facts() -> dict[str, object]:
    """The facts of a good machine for preflight, without its GPUs."""
    return {
        "python": "3.13.5",
        "cpus": 2,
        "memory_mib": 2000,
        "disks": [],
        "data_directory": {"path": "", "problem": None},
        "clock": {"began": 0, "synchronised": True, "services": ["chrony"], "own": ""},
        "cgroup": 2,
        "swap": [],
        "hostname": "gpu-1",
        "machine_id": "0a",
        "product_uuid": "1A",
        "network": {"devices": [], "routes": [], "docker_bridge": ""},
        "sockets": [],
        "firewalls": [],
        "default_address": "10.0.0.2",
        "modules": {},
        "packages": {},
        "kubernetes": {"role": None, "ca_hash": None},
        "sources": [],
    }
