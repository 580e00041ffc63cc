"""Shared by the tests of pools that scale by power: two pools of one GPU machine each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from gpunodes.inventory import Inventory
from gpunodes.lab.layout import Layout, cache_dir

from . import pods, unhealthy
from .conftest import CHECKOUT, NAME, LabSpec, Operator

GPU = ("gpu-1", "gpu-2")
IDLE_S, BOOT_S = 60, 1200
WAIT_S = 1500.0
"""Seconds for a boot, or a shutdown, of an emulated machine beside two others."""
GPU_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
"""An image with the libraries that nvidia-smi needs."""
SETTINGS = {
    "gpunodes_pools": {"h100": {"max": 1, "priority": 50}, "t4": {"max": 1, "priority": 10}},
    "gpunodes_autoscale_idle_timeout": IDLE_S,
    "gpunodes_autoscale_boot_timeout": BOOT_S,
}
LAB = LabSpec(
    "debian13",
    workers=0,
    gpu_workers=2,
    up_options=("--images", "autoscaler"),
    cluster=unhealthy.DRIVER,
    settings=unhealthy.TEST_SETTINGS,
)


def archive() -> str:
    """The image of this checkout, as `make image` builds it."""
    subprocess.run(["make", "--no-print-directory", "image"], cwd=CHECKOUT, check=True, timeout=1200)
    [path] = (CHECKOUT / "build").glob("gpunodes-image-*.oci.tar")
    return str(path)


def power_of(operator: Operator, machine: str) -> str:
    """The power state by the hypervisor."""
    machines = json.loads(operator.lab("status", "--json").stdout)["machines"]
    return str(next(each["power"] for each in machines if each["name"] == machine))


def until(what: str, seen: Callable[[], object], limit_s: float = WAIT_S) -> float:
    """Seconds until something is seen. A question that fails is repeated: an API server under load refuses some."""
    began, failure = time.monotonic(), ""
    while True:
        try:
            if seen():
                break
        except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
            failure = f"; at {time.monotonic() - began:.0f} s: {error}"
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}{failure}"
        time.sleep(3)
    print(f"{what}: {time.monotonic() - began:.0f} s{failure}")
    return time.monotonic() - began


def nodes(operator: Operator) -> set[str]:
    return set(operator.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split())


def phases(operator: Operator) -> dict[str, str]:
    found = operator.document("autoscale", "status", code=None)
    return {each["node"]: each["phase"] for each in found["machines"]}


def job(operator: Operator, name: str, **spec: Any) -> None:
    """A pod that wants both GPUs of a node, and lists them."""
    limits = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    pods.start(operator, name, GPU_IMAGE, "nvidia-smi -L; sleep 86400", limits, **spec)


def runs_on(operator: Operator, name: str) -> str:
    """The node of a pod that runs, "" for one that does not yet."""
    found = json.loads(operator.kubectl("get", "pod", name, "-o", "json"))
    return str(found["spec"].get("nodeName", "")) if found["status"]["phase"] == "Running" else ""


def is_ready(operator: Operator, name: str) -> bool:
    query = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return operator.kubectl("get", "node", name, "-o", query).strip() == "True"


def are_off(operator: Operator) -> bool:
    """Both were idle, are off, and the power server knows."""
    return all(gone(operator, machine) for machine in GPU) and phases(operator) == dict.fromkeys(GPU, "off")


def gone(operator: Operator, machine: str) -> bool:
    return machine not in nodes(operator) and power_of(operator, machine) == "off"


def warnings(operator: Operator, machine: str, reason: str) -> list[str]:
    """The messages of the Warnings of a node with a reason."""
    selector = f"involvedObject.name={machine},type=Warning,reason={reason}"
    found = operator.kubectl("get", "events", "-A", "--field-selector", selector, "-o", "json")
    return [str(each["message"]) for each in json.loads(found)["items"]]


@contextlib.contextmanager
def bmc_without_users(machine: str) -> Iterator[None]:
    """The BMC of a machine responds, and refuses every login."""
    # The emulator reads the file at each request.
    users = Layout(NAME, cache_dir()).state / "bmc" / machine / "htpasswd"
    before = users.read_text()
    users.write_text("")
    try:
        yield
    finally:
        users.write_text(before)


@contextlib.contextmanager
def unreachable_bmc(operator: Operator, machine: str) -> Iterator[None]:
    """The control plane cannot connect to the BMC of a machine."""
    address = str(Inventory(operator.folder / "inventory").variables(machine)["gpunodes_bmc_address"])
    block = f"OUTPUT -p tcp --dport {address.rpartition(':')[2]} -j REJECT"
    operator.ssh("control-1", f"iptables -I {block}")
    try:
        yield
    finally:
        operator.ssh("control-1", f"iptables -D {block}")


def prepare(operator: Operator, image: str, **settings: Any) -> None:
    """Two pools, h100 before t4, of gpu-1 and gpu-2, which have joined; the autoscaler is not installed yet."""
    # The lab names a pool for all GPU machines, which would go before their groups.
    operator.group("h100", "gpu-1", gpunodes_pool="")
    operator.group("t4", "gpu-2", gpunodes_pool="")
    variables = operator.folder / "inventory" / "group_vars" / "all.yml"
    values = {**yaml.safe_load(variables.read_text()), **SETTINGS, "gpunodes_power_archive": image, **settings}
    variables.write_text(yaml.safe_dump(values))
    operator.gpunodes("join", "gpu-*", "--driver", "580")
