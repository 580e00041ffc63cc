"""Shared by the tests of pools that scale by power: two pools of one machine each.

Most of what these tests show needs no GPU. A GPU machine builds its driver for longer than a plain cluster is made, so
that only test_scaling.py has GPU machines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from gpunodes.inventory import Inventory
from gpunodes.lab.layout import Layout, cache_dir

from . import pods, waiting
from .conftest import CHECKOUT, LONG, NAME, LabSpec, Operator

WORKERS = ("worker-1", "worker-2")
IDLE_S, BOOT_S = 60, 1200
WAIT_S = 1500.0
"""Seconds for a boot, or a shutdown, of an emulated machine beside two others."""
POOLS = {"preferred": {"max": 1, "priority": 50}, "other": {"max": 1, "priority": 10}}
"""The first machine is in the first pool, the second in the second."""
IMAGES = ("--images", "autoscaler")
LAB = LabSpec("debian13", workers=2, up_options=IMAGES)
"""Plain workers."""
_ANY_POOL = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gpunodes.dev/pool", "operator": "In", "values": list(POOLS)}]}
            ]
        }
    }
}


def archive() -> str:
    """The image of this checkout, as `make image` builds it."""
    subprocess.run(["make", "--no-print-directory", "image"], cwd=CHECKOUT, check=True, timeout=1200)
    [path] = (CHECKOUT / "build").glob("gpunodes-image-*.oci.tar")
    return str(path)


def power_of(operator: Operator, machine: str) -> str:
    """The power state by the hypervisor."""
    machines = json.loads(operator.lab("status", "--json").stdout)["machines"]
    return str(next(each["power"] for each in machines if each["name"] == machine))


until = functools.partial(waiting.until, limit_s=WAIT_S)


def nodes(operator: Operator) -> set[str]:
    return set(operator.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split())


def phases(operator: Operator) -> dict[str, str]:
    found = operator.document("autoscale", "status", code=None)
    return {each["node"]: each["phase"] for each in found["machines"]}


def reason(operator: Operator, machine: str) -> str:
    """Why a machine is in its phase, or what went wrong with it."""
    found = operator.document("autoscale", "status", code=None)["machines"]
    return str(next(each["reason"] for each in found if each["node"] == machine))


def job(operator: Operator, name: str, **spec: Any) -> None:
    """A pod that fills a worker of either pool: by more than half, so that it keeps the machine on."""
    requests = {"resources": {"requests": {"cpu": "600m"}}}
    image = str(operator.setting("gpunodes_ready_image"))
    pods.start(operator, name, image, "sleep 86400", requests, **{"affinity": _ANY_POOL, **spec})


def runs_on(operator: Operator, name: str) -> str:
    """The node of a pod that runs, "" for one that does not yet."""
    found = json.loads(operator.kubectl("get", "pod", name, "-o", "json"))
    return str(found["spec"].get("nodeName", "")) if found["status"]["phase"] == "Running" else ""


def is_ready(operator: Operator, name: str) -> bool:
    query = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return operator.kubectl("get", "node", name, "-o", query).strip() == "True"


def are_off(operator: Operator, machines: Sequence[str] = WORKERS) -> bool:
    """All were idle, are off, and the power server knows."""
    return all(gone(operator, machine) for machine in machines) and phases(operator) == dict.fromkeys(machines, "off")


def gone(operator: Operator, machine: str) -> bool:
    return machine not in nodes(operator) and power_of(operator, machine) == "off"


def warnings(operator: Operator, machine: str, kind: str, part: str) -> list[str]:
    """The messages of the Warnings of one kind (their reason) about a node that have a part.

    Others may be of an earlier test: that the machine was locked by a power server that was killed, for one.
    """
    selector = f"involvedObject.name={machine},type=Warning,reason={kind}"
    found = operator.kubectl("get", "events", "-A", "--field-selector", selector, "-o", "json")
    messages = [str(each["message"]) for each in json.loads(found)["items"]]
    print(f"{kind}: {messages}")
    return [each for each in messages if part in each]


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


def write_pools(operator: Operator, image: str, machines: Sequence[str], **settings: Any) -> None:
    """Put each of these machines into its pool in the inventory, with the settings of the autoscaler."""
    for pool, machine in zip(POOLS, machines, strict=True):
        # The lab names a pool for all GPU machines, which would go before their groups.
        operator.group(pool, machine, gpunodes_pool="")
    variables = operator.folder / "inventory" / "group_vars" / "all.yml"
    values = {
        **yaml.safe_load(variables.read_text()),
        "gpunodes_pools": POOLS,
        "gpunodes_autoscale_idle_timeout": IDLE_S,
        "gpunodes_autoscale_boot_timeout": BOOT_S,
        "gpunodes_power_archive": image,
        **settings,
    }
    variables.write_text(yaml.safe_dump(values))


def prepare(operator: Operator, **settings: Any) -> None:
    """A cluster whose workers are in pools that scale; the autoscaler is not installed yet."""
    write_pools(operator, archive(), WORKERS, **settings)
    operator.gpunodes("up", limit_s=2 * LONG)
