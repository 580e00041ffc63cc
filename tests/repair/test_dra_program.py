"""NVIDIA's driver for dynamic resource allocation beside a real API server and scheduler, over the stand-in of NVML.

Its program is that of the lab's mirror (`lab up --images dra`), with the arguments, the environment and the rights of
its DaemonSet. The test has the place of the kubelet; the stand-in finds files in place of those of its kernel module.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.ansible.module_utils.cluster import objects, slices
from gpunodes.lab.mirror import gobuild, pins
from gpunodes.lab.standin import objects as standin
from gpunodes.lab.standin.pins import load as standin_pins

from tests.repair import apiserver, controllers
from tests.repair.addon_programs import program, running, until
from tests.repair.apiserver import ApiServer
from tests.unit.test_gpu_serving import rendered

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("gcc") is None, reason="compiles the stand-in, and mounts its files"
)
NODE, ACCOUNT, VERSION = "gpu-1", "nvidia-dra-driver", "580.105.08"
PLACES = ("0000:01:00.0", "0000:02:00.0")
BOARD = "minor {0}\nbus {1}\ndevice 2330\nmemory 81559\ncapability 90\nlost 0\nremap 0\nname NVIDIA H100 80GB HBM3\n"
# In a mount namespace of its own; $1 has the files. Devices are those of /dev/null: they can be opened and written.
_MOUNTS = """set -eu
mount -t tmpfs tmpfs /proc/driver
cp -r "$1/nvidia" /proc/driver
mount -t tmpfs tmpfs /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/urandom c 1 9
for name in nvidiactl nvidia0 nvidia1; do mknod -m 666 "/dev/$name" c 1 3; done
shift
exec "$@"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    program("dra-driver-nvidia-gpu", "gpu-kubelet-plugin")
    with (
        apiserver.running(tmp_path_factory.mktemp("dra"), {"authorization-mode": "RBAC"}) as made,
        controllers.running(made),
    ):
        controllers.add_node(made, NODE, 0)
        yield made


@pytest.fixture(autouse=True)
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


def library(folder: Path) -> None:
    """The stand-in of NVML and the other files of a driver that the program looks for, in a root file system."""
    go = gobuild.toolchain(apiserver.cache(), pins.load(), print)
    header = standin.nvml_header(standin_pins()["nvidia-container-toolkit"], go)
    (folder / "nvml.h").write_text(header)
    (folder / "stubs.c").write_text(standin.stub_source(header))
    libraries = folder / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    made = libraries / f"libnvidia-ml.so.{VERSION}"
    options = ("-shared", "-fPIC", f'-DSTANDIN_VERSION="{VERSION}"', f"-I{folder}", "-Wl,-soname,libnvidia-ml.so.1")
    sources = (standin.SOURCES / "libnvidia-ml" / "nvml.c", folder / "stubs.c")
    subprocess.run(["gcc", *options, "-o", made, *sources], check=True)
    made.with_name("libnvidia-ml.so.1").symlink_to(made.name)
    smi = folder / "usr" / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.touch(mode=0o755)


def boards(folder: Path) -> None:
    """What the stand-in's kernel module shows of two GPUs."""
    for number, place in enumerate(PLACES):
        file = folder / "nvidia" / "gpus" / place / "standin"
        file.parent.mkdir(parents=True)
        uuid = f"uuid GPU-00000000-0000-0000-0000-00000000000{number}\n"
        file.write_text(BOARD.format(number, place) + uuid)
    (folder / "nvidia" / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}\n")


def rights(server: ApiServer) -> Path:
    """A kubeconfig with the token that a kubelet gets for a pod of the driver: it names the node."""
    uid = server.call("GET", f"/api/v1/nodes/{NODE}")["metadata"]["uid"]
    bound = {"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid}}
    path = f"/api/v1/namespaces/kube-system/serviceaccounts/{ACCOUNT}/token"
    document = yaml.safe_load(server.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": server.call("POST", path, {"spec": bound})["status"]["token"]}
    made = server.folder / "driver.conf"
    made.touch(mode=0o600)
    made.write_text(yaml.safe_dump(document))
    return made


@contextlib.contextmanager
def driver(server: ApiServer) -> Iterator[Path]:
    """The driver on a node with two GPUs; gives the file of its output."""
    path = program("dra-driver-nvidia-gpu", "gpu-kubelet-plugin")
    made = rendered()
    objects.apply(list(made.values()), check=False)
    [container] = made["DaemonSet", ACCOUNT]["spec"]["template"]["spec"]["containers"]
    folder = server.folder / "node"
    for name in ("driver-root", "cdi", "registry", "plugins"):
        (folder / name).mkdir(parents=True)
    library(folder / "driver-root")
    boards(folder)
    environment = {each["name"]: each.get("value", NODE) for each in container["env"]} | {
        "CDI_ROOT": str(folder / "cdi"),
        "KUBELET_REGISTRAR_DIRECTORY_PATH": str(folder / "registry"),
        "KUBELET_PLUGINS_DIRECTORY_PATH": str(folder / "plugins"),
        # The place of the mount in the pod, and a file of the image.
        "DRIVER_ROOT_CTR_PATH": str(folder / "driver-root"),
        "NVIDIA_CDI_HOOK_PATH": str(path.with_name("nvidia-cdi-hook")),
        "KUBECONFIG": str(rights(server)),
    }
    assert container["command"][0] == path.name
    argv = ["unshare", "--mount", "sh", "-c", _MOUNTS, "sh", str(folder), str(path), *container["command"][1:]]
    with running(server, "driver", argv, **environment) as log:
        yield log


def claimed(server: ApiServer) -> dict[str, Any]:
    """A claim of a pod, with the GPU that the scheduler chose for it."""
    request = {"name": "gpu", "exactly": {"deviceClassName": slices.DRIVER}}
    claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    server.call("POST", claims, {"metadata": {"name": "one"}, "spec": {"devices": {"requests": [request]}}})
    container = {"name": "c", "image": "i", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": "one"}]}
    server.call("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": "one"}, "spec": spec})
    pod = "/api/v1/namespaces/default/pods/one"
    until("the pod has its node", lambda: server.call("GET", pod)["spec"].get("nodeName") == NODE)
    return dict(server.call("GET", f"{claims}/one"))


def prepared(server: ApiServer, claim: dict[str, Any]) -> bytes:
    """The driver's response when the kubelet asks for a claim's devices (k8s.io/kubelet, pkg/apis/dra/v1/api.proto)."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    about = claim["metadata"]
    names = (about["namespace"], about["uid"], about["name"])
    message = field(1, b"".join(field(number, each.encode()) for number, each in enumerate(names, 1)))
    socket = server.folder / "node" / "plugins" / slices.DRIVER / "dra.sock"
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources")
        return bytes(call(message, timeout=60))


def test_the_driver_offers_its_gpus_and_prepares_the_one_of_a_claim(server: ApiServer) -> None:
    client = kube_api.admin()
    with driver(server) as log:
        until("it offers its GPUs", lambda: slices.offered(client))
        assert slices.offered(client) == {NODE: {f"{NODE}/gpu-0", f"{NODE}/gpu-1"}}
        until("it waits for a kubelet", lambda: list((server.folder / "node" / "registry").iterdir()))
        claim = claimed(server)
        [given] = claim["status"]["allocation"]["devices"]["results"]
        assert slices.allocated(client) == {f"{NODE}/{given['device']}"}
        answer = prepared(server, claim)
        assert b"k8s.gpu.nvidia.com/claim=" in answer, answer
        [written] = (server.folder / "node" / "cdi").glob("*.yaml")
        devices = json.dumps(yaml.safe_load(written.read_text())["devices"])
        assert f"/dev/nvidia{given['device'].removeprefix('gpu-')}" in devices
        assert "orbidden" not in log.read_text()
