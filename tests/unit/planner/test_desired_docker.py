"""Docker for people: on GPU hosts, which are not nodes, and on nodes that had it before they joined."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.host import spec
from gpunodes.planner import gpu_software
from gpunodes.planner.desired import Desired, desired
from gpunodes.settings import problems

from tests.stand_ins import given, gpu_machine

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
DEBIAN_12 = {"id": "debian", "version": "12", "codename": "bookworm", "name": "Debian GNU/Linux 12"}
HOOK = "/usr/bin/nvidia-container-runtime-hook"


def machine(*, docker: str = "", containerd: str = "", **changes: Any) -> dict[str, Any]:
    """A machine with a GPU, on which these packages of Docker and containerd are installed."""
    made = gpu_machine(GPU, **changes)
    made["gpu"]["runtimes"] = {docker: "26.1.5"} if docker else {}
    return {**made, "packages": {containerd: "1.7.24"} if containerd else {}}


def host(found: dict[str, Any] | None = None, **more: Any) -> Desired:
    made = desired(given(found or machine(), groups=("gpu_hosts",), **more))
    assert isinstance(made, Desired), made
    return made


def node(found: dict[str, Any] | None = None, **more: Any) -> Desired:
    made = desired(given(found or machine(), **more))
    assert isinstance(made, Desired), made
    return made


def names(part: spec.Spec) -> list[str]:
    return [package.name for package in part.packages]


# GPU hosts


def test_a_gpu_host_gets_docker_and_nothing_of_kubernetes() -> None:
    made = host(gpunodes_runtime="docker", gpunodes_docker_users=["alice"])
    assert list(made.wanted) == ["docker"]
    part = made.wanted["docker"]
    assert names(part) == ["docker.io", "docker-cli"]
    assert all(package.hold for package in part.packages)
    assert part.members == {"docker": ["alice"]}
    # Stopped by a reset before their packages are removed, and what they leave is removed too.
    assert [service.name for service in part.services] == ["containerd", "docker"]
    assert {"/var/lib/docker", "/var/lib/containerd"} <= set(part.directories)
    assert made.images == ["nvcr.io/nvidia/k8s-device-plugin:v0.19.0"]
    toolkit = made.gpu.wanted["container_toolkit"]
    assert [service.name for service in toolkit.services] == ["docker"]
    assert [file.path for file in toolkit.files][-1] == "/usr/local/libexec/gpunodes/nvidia-container-runtime"


def test_the_data_of_docker_is_in_the_data_directory() -> None:
    part = host(gpunodes_runtime="docker", gpunodes_data_directory="/data").wanted["docker"]
    assert part.data_directory == "/data"
    assert part.moved == {"containerd": "/var/lib/containerd", "docker": "/var/lib/docker"}
    assert host(gpunodes_runtime="docker").wanted["docker"].data_directory == ""


def test_a_gpu_host_gets_no_runtime_unless_docker_is_requested() -> None:
    made = host(gpunodes_docker_users=["alice"])
    assert made.wanted == {}
    assert made.gpu.wanted["container_toolkit"].services == ()
    assert "gpu_driver" in made.gpu.wanted


@pytest.mark.parametrize(
    ("found", "packages"),
    [
        (machine(docker="docker.io", containerd="containerd"), ["docker.io", "docker-cli"]),
        (machine(docker="docker-ce", containerd="containerd.io"), ["docker-ce", "docker-ce-cli"]),
        (machine(docker="docker.io", containerd="containerd", os=DEBIAN_12), ["docker.io"]),
    ],
)
def test_an_installed_docker_stays_with_its_source(found: dict[str, Any], packages: list[str]) -> None:
    """A second file for the same source would stop apt: `Conflicting values set for option Signed-By`."""
    made = host(found)
    assert made.runtime == "docker"
    assert names(made.wanted["docker"]) == packages
    assert not any(package.hold for package in made.wanted["docker"].packages)
    assert list(made.wanted["docker"].repositories) == []
    # As before it was installed: a second run changes nothing.
    assert [service.name for service in made.gpu.wanted["container_toolkit"].services] == ["docker"]


def test_a_gpu_host_with_containerd_alone_keeps_it() -> None:
    made = host(machine(containerd="containerd"))
    assert (made.runtime, made.wanted) == ("containerd", {})
    assert [service.name for service in made.gpu.wanted["container_toolkit"].services] == ["containerd"]


def test_a_gpu_host_gets_docker_from_the_source_that_works() -> None:
    part = host(machine(os=DEBIAN_12), gpunodes_runtime="docker").wanted["docker"]
    assert names(part) == ["docker-ce", "docker-ce-cli"]
    assert [repository.name for repository in part.repositories] == ["docker"]
    own = host(gpunodes_runtime="docker", gpunodes_containerd_source="docker").wanted["docker"]
    assert names(own) == ["docker-ce", "docker-ce-cli"]


def test_feature_gates_do_not_concern_a_gpu_host() -> None:
    assert host(gpunodes_feature_gates={"NoSuchGate": True}).gpu.gpus == 1


def test_mirrors_are_for_containerd_which_pulls_for_docker() -> None:
    part = host(gpunodes_runtime="docker", gpunodes_image_mirrors={"nvcr.io": "https://m"}).wanted["docker"]
    assert [file.path for file in part.files] == ["/etc/containerd/certs.d/nvcr.io/hosts.toml"]


# Nodes


def test_a_join_with_containerd_keeps_docker_and_its_users() -> None:
    made = node(machine(docker="docker.io", containerd="containerd"), gpunodes_docker_users=["alice"])
    assert made.runtime == "containerd"
    assert made.wanted["docker"] == spec.Spec(members={"docker": ["alice"]})
    assert "cri_dockerd" not in made.wanted
    # An entry that was removed is removed on the machine.
    assert node(machine(docker="docker.io")).wanted["docker"] == spec.Spec(members={"docker": []})


def test_a_node_without_docker_gets_none_for_its_users() -> None:
    assert "docker" not in node(gpunodes_docker_users=["alice"]).wanted


def test_a_join_keeps_the_containerd_that_docker_depends_on() -> None:
    """Debian's containerd would remove containerd.io, and docker-ce with it."""
    part = node(machine(docker="docker-ce", containerd="containerd.io")).wanted["containerd"]
    assert (names(part), list(part.repositories)) == (["containerd.io"], [])
    part = node(machine(docker="docker.io", containerd="containerd")).wanted["containerd"]
    assert names(part) == ["containerd"]


def test_a_join_with_docker_changes_neither_docker_nor_its_configuration() -> None:
    found = machine(docker="docker.io", containerd="containerd")
    before, after = host(found), node(found, gpunodes_runtime="docker", gpunodes_docker_users=["alice"])
    assert names(after.wanted["docker"]) == names(before.wanted["docker"])
    assert after.wanted["docker"].members == {"docker": ["alice"]}
    toolkit = [made.gpu.wanted["container_toolkit"].generated for made in (before, after)]
    assert set(toolkit[1]) <= set(toolkit[0])


def test_gpu_install_configures_docker_on_a_node_with_containerd() -> None:
    part = node(machine(), node={"runtime": "containerd"}, runtimes=["containerd", "docker"])
    assert [service.name for service in part.gpu.wanted["container_toolkit"].services] == ["containerd", "docker"]


# The setting


@pytest.mark.parametrize("value", [["alice"], ["svc-1", "x_y"], [r"AD\alice"], ["alice@example.org"], ["machine$"], []])
def test_names_of_users_are_accepted(value: list[str]) -> None:
    assert list(problems({"gpunodes_docker_users": value})) == []


@pytest.mark.parametrize("value", [["-G"], ["a b"], [""], ["a:b"], ["a\nb"], ["$(id)"], [{"a": 1}], {"a": "b"}])
def test_other_texts_are_refused_before_a_machine_is_contacted(value: Any) -> None:
    [problem] = problems({"gpunodes_docker_users": value})
    assert problem.key == "gpunodes_docker_users"


# The program through which Docker starts containers


def started(folder: Path, config: Any, *argv: str) -> list[str]:
    """The program's environment and arguments for NVIDIA's runtime, with ``config`` as the container's config.json."""
    bundle = folder / "a bundle"
    bundle.mkdir()
    # containerd writes it without spaces.
    (bundle / "config.json").write_text(json.dumps(config, separators=(",", ":")))
    runtime = folder / "runtime"
    runtime.write_text('#!/bin/sh\nprintf "%s\\n" "$NVIDIA_CTK_CONFIG_FILE_PATH" "$@"\n')
    runtime.chmod(0o755)
    text = gpu_software._DOCKER_RUNTIME.content.replace("/usr/bin/nvidia-container-runtime", str(runtime))
    line = [each.replace("BUNDLE", str(bundle)) for each in argv]
    done = subprocess.run(["/bin/sh", "-c", text, "sh", *line], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.splitlines()[1:] == line, "every argument is passed on unchanged"
    return done.stdout.splitlines()


CREATE = ("--root", "/run/runc", "--systemd-cgroup", "create", "--bundle", "BUNDLE", "--pid-file", "a  b", "ID")


@pytest.mark.parametrize("argv", [CREATE, ("create", "-b", "BUNDLE", "ID"), ("create", "--bundle=BUNDLE", "ID")])
@pytest.mark.parametrize("other", [[], [{"path": "/proc/1/exe", "args": ["libnetwork-setkey", "-exec-root"]}]])
def test_a_container_with_nvidias_hook_gets_what_its_variable_says(
    tmp_path: Path, argv: tuple[str, ...], other: list[Any]
) -> None:
    hook = {"path": HOOK, "args": ["nvidia-container-runtime-hook", "prestart"], "env": ["A=b"]}
    found = started(tmp_path, {"hooks": {"prestart": [*other, hook]}}, *argv)
    assert found[0] == gpu_software._DOCKER_REQUESTS.path


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"], "args": [HOOK]}},
        {"process": {"env": [f'X="path":"{HOOK}","args":["a"]', f'"path":"{HOOK}","args":[']}},
        {"annotations": {"path": HOOK, "args": "["}, "root": {"path": HOOK}},
        {"annotations": {f'"path":"{HOOK}","args":[': f'","path":"{HOOK}","args":['}},
        {"hooks": {"createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]}]}},
    ],
)
def test_no_text_of_an_image_or_pod_looks_like_the_hook(tmp_path: Path, config: Any) -> None:
    assert started(tmp_path, config, *CREATE)[0] == ""


@pytest.mark.parametrize(
    "argv", [("state", "ID"), ("kill", "ID", "9"), ("create", "--bundle", "/no/such folder", "ID")]
)
def test_other_calls_reach_the_runtime_unchanged(tmp_path: Path, argv: tuple[str, ...]) -> None:
    assert started(tmp_path, {}, *argv)[0] == ""
