"""Benchmarks of a GPU node with stand-ins: its join, relative to a shell script with the same packages, and its repair.

`python -m tests.bench.gpu` runs only these.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.bench import repair
from tests.bench.table import Row, show

HERE = Path(__file__).parent
ROLES = HERE.parents[1] / "roles"


def measure(folder: Path) -> Iterator[Row]:
    """The rows, each as soon as it is measured; ``folder`` is empty."""
    # Imported here: that module imports this one.
    from tests.bench.__main__ import KUBECTL, Bench, tasks_of

    bench = Bench(folder)

    def bare() -> None:
        line = bench.on("control-1", "kubeadm token create --ttl 15m --print-join-command").split()
        for script, arguments in (("bare_join.sh", "http://mirror.lab 1.36"), ("bare_gpu.sh", "http://mirror.lab")):
            bench.on("gpu-1", f"cat >/run/{script}", stdin=(HERE / script).read_text())
            bench.on("gpu-1", f"sh /run/{script} {arguments}", stdin=f"{line[2]} {line[4]} {line[6]}\n")
        wait = f"{KUBECTL} wait --timeout=600s"
        bench.on(
            "control-1",
            f"{wait} --for=create node/gpu-1 && {KUBECTL} label node gpu-1 gpunodes.dev/gpu=true && "
            f"{KUBECTL} apply -f - && {wait} --for=condition=Complete job/smi",
            stdin=_manifests(),
        )

    try:
        bench.down()
        bench.lab("up", "--workers", "0", "--gpu-workers", "1")
        bench.gpunodes("init-master", "control-1")
        bench.lab("snapshot", "cluster")
        bare_s = bench.seconds(bare)
        bench.restore("cluster")
        join_s = bench.join("gpu-1")
        yield Row(
            "GPU join, relative to a shell script",
            f"{join_s / bare_s:.2f}",
            "1.25",
            f"{join_s:.0f} s, script {bare_s:.0f} s; stand-in GPUs, whose module is built on the machine",
        )
        yield Row("tasks of a GPU join", f"{tasks_of(folder / 'state')}", "-", "as counted by Ansible")
        again_s = bench.join("gpu-1")
        yield Row(
            "second GPU join, relative to the first",
            f"{again_s / join_s:.2f}",
            "0.10",
            f"{again_s:.0f} s, first {join_s:.0f} s",
        )
        yield repair.measure(bench)
    finally:
        bench.down()


def _manifests() -> str:
    """The role's manifest of the device plugin, and a job that requests a GPU."""
    image = yaml.safe_load((ROLES / "device_plugin/defaults/main.yml").read_text())["device_plugin_image"]
    plugin = (ROLES / "device_plugin/templates/nvidia.yml.j2").read_text()
    return plugin.replace("{{ device_plugin_image }}", image) + (HERE / "gpu_job.yml").read_text()


if __name__ == "__main__":
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as scratch:
        for row in measure(Path(scratch)):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    show(rows)
