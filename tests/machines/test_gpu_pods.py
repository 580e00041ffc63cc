"""What a GPU node serves: its kubelet's feature gates, and pods, jobs and notebooks with GPUs.

The GPUs are the lab's stand-ins: no GPU computes anything. test_gpu.py tests the software itself.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from . import notebook_image, unhealthy
from .conftest import BARE, LabSpec, Operator, lines
from .pods import ALL_OK, GPU_IMAGE, NOTHING, ended, example, examples, greedy, levels, start

LAB = LabSpec("debian13", workers=1, gpu_workers=1)
UP_LIMIT_S = 3000.0
"""An emulated machine builds a kernel module while a control plane starts."""
SETTINGS = {"gpunodes_pool": "h100"}
BUSYBOX = "e2e-test-images/busybox:1.37.0-1"
WORKLOADS = Path(__file__).parents[2] / "examples" / "workloads"
REGISTRY = Path(__file__).parent / "private_registry.py"


def test_a_removed_feature_gate_is_refused_before_anything_is_changed(operator: Operator) -> None:
    bare = lines(operator.ssh("gpu-1", BARE))
    unhealthy.write(operator, "gpu-1", {**SETTINGS, "gpunodes_feature_gates": {"Accelerators": True}})
    found = operator.document("up", "--driver", "580", code=1)["findings"]
    found = [one for one in found if one["severity"] == "error"]
    assert [(one["machine"], one["check"]) for one in found] == [("gpu-1", "gates")]
    assert "was removed in Kubernetes 1.11" in json.dumps(found)
    assert "device plugins replace it" in json.dumps(found)
    assert lines(operator.ssh("gpu-1", BARE)) == bare


def test_up_makes_a_cluster_that_serves_gpus(operator: Operator) -> None:
    unhealthy.write(operator, "gpu-1", SETTINGS)
    operator.gpunodes("up", "--driver", "580", limit_s=UP_LIMIT_S)
    found = {machine["machine"]: machine for machine in operator.document("gpu", "verify")["machines"]}
    assert levels(found["gpu-1"]) == ALL_OK
    assert found["worker-1"]["gpus"] == 0
    label = "jsonpath={.metadata.labels.gpunodes\\.dev/pool}"
    assert operator.kubectl("get", "node", "gpu-1", "-o", label).strip() == "h100"
    assert operator.kubectl("get", "node", "gpu-1", "-o", "jsonpath={.spec.taints[*].key}").split() == []


def test_the_refused_feature_gate_would_stop_the_kubelet(operator: Operator) -> None:
    gates = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "featureGates": {"Accelerators": True},
    }
    operator.ssh("gpu-1", f"mkdir /run/gates; echo '{json.dumps(gates)}' >/run/gates/10-feature-gates.conf")
    kubelet = "timeout 120 kubelet --config=/var/lib/kubelet/config.yaml --config-dir=/run/gates"
    output = operator.ssh("gpu-1", f"{kubelet} 2>&1; echo ended with $?; rm -r /run/gates")
    assert "unrecognized feature gate: Accelerators" in output
    assert not output.endswith(("ended with 0\n", "ended with 124\n"))


def test_a_node_without_gpus_has_no_gpu_software(operator: Operator) -> None:
    assert (
        operator.ssh("worker-1", "dpkg-query -W '*nvidia*' 2>/dev/null; ls /var/lib/gpunodes/gpu.json", code=None) == ""
    )


def test_a_cell_of_a_notebook_sees_the_gpu(operator: Operator) -> None:
    """By nvidia-smi; the stand-in for CUDA's library counts no GPUs."""
    notebook_image.load(operator, "gpu-1")
    given = ("--pool", "h100", "--image", notebook_image.NAME, "--memory", "1")
    operator.gpunodes("jupyter", "up", "--scratch", *given)
    seen = operator.gpunodes("jupyter", "verify", code=1).stderr
    assert "a cell sees 1 GPUs by nvidia-smi and 0 by CUDA" in " ".join(seen.split())
    operator.gpunodes("jupyter", "down", "--yes")


def test_gpus_go_only_to_pods_that_request_them(operator: Operator) -> None:
    """No GPU by a variable of an image or a pod, by NVIDIA's runtime, or by an annotation."""
    assert greedy(operator, "gpu-1", GPU_IMAGE) == NOTHING


def test_the_examples_for_pools_run(operator: Operator) -> None:
    start(operator, "only", GPU_IMAGE, "nvidia-smi -L", example("One GPU"), **example("Require a pool"))
    node, log = ended(operator, "only")
    assert (node, log.count("UUID: GPU-")) == ("gpu-1", 1)
    image = f"registry.k8s.io/{BUSYBOX}"
    start(operator, "preferred", image, "true", {}, **example("Prefer a generation"))
    assert ended(operator, "preferred")[0] == "gpu-1"
    operator.kubectl("cordon", "gpu-1")
    start(operator, "elsewhere", image, "true", {}, **example("Prefer a generation"))
    assert ended(operator, "elsewhere")[0] == "worker-1"
    operator.kubectl("uncordon", "gpu-1")


def test_the_example_jobs_run(operator: Operator) -> None:
    """The job with one GPU runs; the cluster accepts the distributed one, which needs sixteen GPUs."""
    for path in WORKLOADS.glob("*.yml"):
        operator.ssh("control-1", f"cat >/run/{path.name} <<'END'\n{path.read_text()}END")
    operator.kubectl("apply", "--dry-run=server", "-f", "/run/distributed-job.yml")
    operator.kubectl("apply", "-f", "/run/gpu-job.yml")
    operator.kubectl("wait", "--for=condition=Complete", "job/gpu-job", "--timeout=180s")
    log = operator.kubectl("logs", "job/gpu-job")
    assert "NVIDIA-SMI" in log
    operator.kubectl("delete", "job", "gpu-job", "--wait=true")


def test_the_example_for_a_private_registry_runs(operator: Operator) -> None:
    hosts = '[host."http://127.0.0.1:5000"]\ncapabilities = ["pull", "resolve"]\n'
    folder = "/etc/containerd/certs.d/registry.example"
    operator.ssh("gpu-1", f"mkdir {folder}; cat >{folder}/hosts.toml <<'END'\n{hosts}END")
    operator.ssh("gpu-1", f"cat >/run/registry.py <<'END'\n{REGISTRY.read_text()}END")
    operator.ssh("gpu-1", "systemd-run --unit=registry --collect python3 /run/registry.py")
    [login] = examples("Images from a private registry")
    words = shlex.split(login.replace("--namespace team", "--namespace default"))[1:]
    operator.gpunodes(*words, "--user", "robot", "--password-stdin", given="correct-horse\n")
    start(operator, "private", f"registry.example/{BUSYBOX}", "true", {}, **example("Require a pool"))
    assert ended(operator, "private")[0] == "gpu-1"
    operator.gpunodes("registry", "logout", "registry.example", "--namespace", "default")
    assert "correct-horse" not in "".join(operator.output)
    operator.ssh("gpu-1", f"systemctl stop registry; rm -r {folder}")


def kubelets(operator: Operator) -> dict[str, list[str]]:
    """How kubelets differ from their settings, by machine, as `status` says."""
    return {
        each["machine"]: [one["text"] for one in each["differences"] if one["kind"] == "kubelet"]
        for each in operator.document("status")["drift"]
        if any(one["kind"] == "kubelet" for one in each["differences"])
    }


def test_a_changed_feature_gate_is_shown_until_it_is_applied(operator: Operator) -> None:
    """`status` and `preflight` show it; `join`, as `up`, applies it, and removes a gate that the settings drop."""
    assert kubelets(operator) == {}
    unhealthy.write(operator, "gpu-1", {**SETTINGS, "gpunodes_feature_gates": {"ContainerCheckpoint": False}})
    text = "kubelet feature gate ContainerCheckpoint is not set, the settings say false"
    assert kubelets(operator) == {"gpu-1": [text]}
    found = [each for each in operator.document("preflight", "gpu-1")["findings"] if each["check"] == "drift"]
    assert [(each["machine"], text in each["fact"]) for each in found] == [("gpu-1", True)]
    operator.gpunodes("join", "gpu-1", "--driver", "580")
    assert kubelets(operator) == {}
    unhealthy.write(operator, "gpu-1", SETTINGS)
    text = "kubelet feature gate ContainerCheckpoint is false, neither the settings nor the cluster set it"
    shown = " ".join(operator.gpunodes("status").stdout.split())
    assert f"drift: gpu-1: {text}" in shown
    assert "`gpunodes rollout apply --kubelets` applies the kubelets' settings" in shown
    operator.gpunodes("join", "gpu-1", "--driver", "580")
    assert kubelets(operator) == {}
