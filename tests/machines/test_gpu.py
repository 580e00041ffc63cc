"""GPU nodes from bare machines to pods with GPUs, and back. The GPUs are the lab's stand-ins.

This tests the software: packages, modules, runtimes, kubelet, pods. No GPU computes anything.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import time
from pathlib import Path
from typing import Any

import yaml

from . import notebook_image
from .conftest import BARE, STATE, LabSpec, Operator, lines
from .pods import NOTHING, ended, greedy, start

LAB = LabSpec("debian13", workers=1, gpu_workers=2)
GPU = ("gpu-1", "gpu-2")
UP_LIMIT_S = 3000.0
"""Two emulated machines build a kernel module each while a control plane starts."""
DEDICATED = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpu-1": {"gpunodes_pool": "h100"},
    "gpu-2": {"gpunodes_gpu_taint": True, "gpunodes_node_taints": [DEDICATED]},
}
GPU_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
BUSYBOX = "e2e-test-images/busybox:1.37.0-1"
CHECKOUT = Path(__file__).parents[2]
SCHEDULING = CHECKOUT / "docs" / "scheduling.md"
WORKLOADS = CHECKOUT / "examples" / "workloads"
REGISTRY = Path(__file__).parent / "private_registry.py"

_bare: dict[str, list[str]] = {}


def write_settings(operator: Operator, machine: str, **more: Any) -> None:
    """Write a machine's settings to the inventory."""
    path = operator.folder / "inventory" / "host_vars" / f"{machine}.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({**SETTINGS[machine], **more}))


def examples(heading: str) -> list[str]:
    """The examples below a heading of docs/scheduling.md."""
    sections = re.split(r"^#+ ", SCHEDULING.read_text(), flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"{heading}\n")]
    return [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)]


def example(heading: str) -> dict[str, Any]:
    """The last example below a heading: a part of a pod."""
    part: dict[str, Any] = yaml.safe_load(examples(heading)[-1])
    return part


def tolerations() -> dict[str, Any]:
    """The tolerations of a pod for gpu-2, whose pool has an additional taint."""
    return {"tolerations": [*example("GPU nodes for GPU pods")["tolerations"], {**DEDICATED, "operator": "Equal"}]}


def levels(machine: dict[str, Any]) -> dict[str, str]:
    return {level["level"]: level["state"] for level in machine["levels"]}


def test_the_machines_are_bare(operator: Operator) -> None:
    for machine in GPU:
        _bare[machine] = list(lines(operator.ssh(machine, BARE)))
        assert operator.ssh(machine, "ls /dev/nvidia* 2>/dev/null", code=None) == ""


def test_verify_reports_the_missing_driver(operator: Operator) -> None:
    document = operator.document("gpu", "verify", "gpu-1", code=3)
    assert document["machines"][0]["levels"][0]["level"] == "host"
    assert "nvidia is not loaded" in document["machines"][0]["levels"][0]["fact"]


def test_a_removed_feature_gate_is_refused_before_anything_is_changed(operator: Operator) -> None:
    write_settings(operator, "gpu-1", gpunodes_feature_gates={"Accelerators": True})
    write_settings(operator, "gpu-2")
    found = operator.document("up", "--driver", "580", code=1)["findings"]
    found = [one for one in found if one["severity"] == "error"]
    assert [(one["machine"], one["check"]) for one in found] == [("gpu-1", "gates")]
    assert "was removed in Kubernetes 1.11" in json.dumps(found)
    assert "device plugins replace it" in json.dumps(found)
    assert lines(operator.ssh("gpu-1", BARE)) == _bare["gpu-1"]
    write_settings(operator, "gpu-1")


def test_up_makes_a_cluster_that_serves_gpus(operator: Operator) -> None:
    operator.gpunodes("up", "--driver", "580", limit_s=UP_LIMIT_S)
    document = operator.document("gpu", "verify")
    found = {machine["machine"]: machine for machine in document["machines"]}
    for name in GPU:
        assert levels(found[name]) == dict.fromkeys(("host", "container", "kubelet", "pod"), "ok")
    assert found["worker-1"]["gpus"] == 0


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


def test_pools_are_labels_and_taints(operator: Operator) -> None:
    label = "jsonpath={.metadata.labels.gpunodes\\.dev/pool}"
    assert [operator.kubectl("get", "node", name, "-o", label).strip() for name in GPU] == ["h100", "gpu"]
    taints = [operator.kubectl("get", "node", name, "-o", "jsonpath={.spec.taints[*].key}") for name in GPU]
    assert [taint.split() for taint in taints] == [[], ["dedicated", "nvidia.com/gpu"]]
    operator.kubectl("label", "node", "gpu-1", "team=a")


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in GPU}
    document = operator.document("up", "--driver", "580")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert {machine: operator.ssh(machine, STATE) for machine in GPU} == before
    assert operator.kubectl("get", "node", "-l", "team=a", "-o", "name").strip() == "node/gpu-1"


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
    """No GPU by a variable of an image or pod, by NVIDIA's runtime, or by an annotation."""
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


def test_a_pod_waits_when_all_gpus_are_taken(operator: Operator) -> None:
    for name, count in (("first", 2), ("second", 2), ("third", 1)):
        resources = {"resources": {"limits": {"nvidia.com/gpu": count}}}
        start(operator, name, GPU_IMAGE, "nvidia-smi -L; sleep 3600", resources, **tolerations())
    operator.kubectl("wait", "--for=condition=Ready", "pod/first", "pod/second", "--timeout=180s")
    assert operator.kubectl("logs", "first").count("UUID: GPU-") == 2
    waiting = operator.kubectl("get", "pod", "third", "-o", "jsonpath={.status.conditions[0].message}")
    assert "Insufficient nvidia.com/gpu" in waiting
    operator.kubectl("delete", "pod", "first", "--wait=true")
    operator.kubectl("wait", "--for=condition=Ready", "pod/third", "--timeout=180s")
    assert operator.kubectl("logs", "third").count("UUID: GPU-") == 1


def test_a_daemon_reload_takes_no_gpu_away(operator: Operator) -> None:
    for machine in GPU:
        operator.ssh(machine, "systemctl daemon-reload")
    time.sleep(5)
    assert operator.kubectl("exec", "third", "--", "nvidia-smi", "-L").count("UUID: GPU-") == 1


def test_an_upgrade_keeps_the_driver(operator: Operator) -> None:
    """Both the hold of its packages and the pin of its branch keep it. The repository has a newer branch."""
    unpinned = ("-oDir::Etc::Preferences=/dev/null", "-oDir::Etc::PreferencesParts=/dev/null")
    driver = {"nvidia-open", "nvidia-kernel-open-dkms"}

    def upgraded(*options: str) -> set[str]:
        """The packages that `apt-get upgrade` would upgrade."""
        plan = operator.ssh("gpu-1", f"apt-get --simulate {' '.join(options)} upgrade")
        return set(re.findall(r"^Inst (\S+) \[", plan, re.MULTILINE))

    operator.ssh("gpu-1", "apt-get -qq update")
    assert driver <= upgraded(*unpinned, "--ignore-hold"), "the repository has no newer version: this test cannot fail"
    assert not driver & upgraded("--ignore-hold")
    assert not driver & upgraded(*unpinned)
    versions = f"dpkg-query -W -f '${{Package}} ${{Version}}\n' {' '.join(sorted(driver))}"
    before = operator.ssh("gpu-1", versions)
    assert len(lines(before)) == len(driver)
    options = " ".join(unpinned)
    operator.ssh("gpu-1", f"DEBIAN_FRONTEND=noninteractive apt-get -qqy {options} upgrade >/dev/null")
    assert operator.ssh("gpu-1", versions) == before


def test_the_driver_is_not_removed_while_a_pod_uses_it(operator: Operator) -> None:
    node = operator.kubectl("get", "pod", "third", "-o", "jsonpath={.spec.nodeName}").strip()
    done = operator.gpunodes("gpu", "remove", "--yes", node, code=1)
    assert f"default/third uses GPUs of {node}" in done.stdout + done.stderr
    assert operator.document("gpu", "verify", node)["exit_code"] == 0
    operator.kubectl("delete", "pod", "second", "third", "--wait=true")


def test_removal_leaves_a_node_without_gpus(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "--yes", "gpu-2")
    assert operator.ssh("gpu-2", "lsmod | grep -c '^nvidia'", code=None).strip() == "0"
    assert (
        operator.ssh("gpu-2", "dpkg-query -W -f '${db:Status-Status} ${Package}\n' '*nvidia*' | grep ^installed", None)
        == ""
    )
    labels = operator.kubectl("get", "node", "gpu-2", "-o", "jsonpath={.metadata.labels}")
    assert "gpunodes.dev/gpu" not in labels
    taints = operator.kubectl("get", "node", "gpu-2", "-o", "jsonpath={.spec.taints[*].key}")
    assert taints.split() == ["dedicated"]
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]}["gpu-2"]


def test_requested_cuda_versions_are_installed(operator: Operator) -> None:
    # Together they need more space than the machine has.
    operator.gpunodes("gpu", "install", "gpu-2", "--driver", "580", "--with-cuda", "13.0")
    operator.gpunodes("gpu", "install", "gpu-2", "--driver", "580", "--with-cuda", "13.0", "--with-cuda", "13.1")
    for version in ("13.0", "13.1"):
        assert f"release {version}" in operator.ssh("gpu-2", f"/usr/local/cuda-{version}/bin/nvcc --version")


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
    write_settings(operator, "gpu-1", gpunodes_feature_gates={"ContainerCheckpoint": False})
    text = "kubelet feature gate ContainerCheckpoint is not set, the settings say false"
    assert kubelets(operator) == {"gpu-1": [text]}
    found = [each for each in operator.document("preflight", "gpu-1")["findings"] if each["check"] == "drift"]
    assert [(each["machine"], text in each["fact"]) for each in found] == [("gpu-1", True)]
    operator.gpunodes("join", "gpu-1", "--driver", "580")
    assert kubelets(operator) == {}
    write_settings(operator, "gpu-1")
    text = "kubelet feature gate ContainerCheckpoint is false, neither the settings nor the cluster set it"
    shown = " ".join(operator.gpunodes("status").stdout.split())
    assert f"drift: gpu-1: {text}" in shown
    assert "`gpunodes up` applies the kubelets' settings" in shown
    operator.gpunodes("join", "gpu-1", "--driver", "580")
    assert kubelets(operator) == {}


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "gpu-1", "gpu-2")
    for machine in GPU:
        assert lines(operator.ssh(machine, BARE)) == _bare[machine]
