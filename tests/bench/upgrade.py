"""Benchmarks of an upgrade: of a node, relative to a script of kubeadm's documented steps; and what users notice.

`python -m tests.bench.upgrade` runs only these.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.bench.table import Row, show
from tests.machines import availability

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

HERE = Path(__file__).parent
OLD, NEW = "1.35", "1.36"
UPGRADE = ("upgrade", NEW, "--yes", "--no-backup")
PORT = 30080
"""Of the Service in web.yml, on every node."""


def measure(folder: Path) -> Iterator[Row]:
    """The rows, each as soon as it is measured; ``folder`` is empty."""
    # Imported here: that module imports this one.
    from tests.bench.__main__ import KUBECTL, Bench

    bench = Bench(folder)
    try:
        bench.down()
        bench.lab("up", "--workers", "2", "--kubernetes-version", OLD, "--kubernetes-version", NEW)
        bench.gpunodes("up", "--kubernetes-version", OLD)
        bench.on("control-1", f"{KUBECTL} apply -f -", stdin=(HERE / "web.yml").read_text())
        bench.on("control-1", f"{KUBECTL} rollout status deployment/web --timeout=300s")
        with _watched(bench, "control-1", "https", 6443, "/readyz") as api, _watched(bench, "worker-2") as web:
            bench.gpunodes(*UPGRADE, "--only", "control-1")
        found, noticed = api.report(), web.report()
        yield Row(
            "the API of the only control plane does not respond while it is upgraded",
            f"{sum(gap.seconds for gap in found.gaps):.0f} s",
            "-",
            f"{len(found.gaps)} times, at most {found.longest_gap_s:.0f} s; {noticed.failed} of {noticed.requests} "
            "requests to a Service on workers were lost",
        )
        bench.lab("snapshot", "control-plane")
        yield from _node(bench)
    finally:
        bench.down()


def _node(bench: Bench) -> Iterator[Row]:
    """The upgrade of worker-1, then the same by the script."""
    with _watched(bench, "worker-2") as web:
        done: list[str] = []
        whole_s = bench.seconds(lambda: done.append(bench.gpunodes(*UPGRADE, "--only", "worker-1", "--json")))
    machines = [machine for rollout in json.loads(done[0])["rollouts"] for machine in rollout["machines"]]
    node_s = next(float(machine["seconds"]) for machine in machines if machine["name"] == "worker-1")
    found = web.report()
    yield Row(
        "requests lost while a node is drained, upgraded and given back",
        str(found.failed),
        "0",
        f"of {found.requests} to a Service of two pods with a disruption budget; longest gap "
        f"{found.longest_gap_s:.1f} s",
    )
    bench.restore("control-plane")
    bare_s = bench.seconds(lambda: _bare(bench))
    yield Row(
        "upgrade of a node, relative to a shell script",
        f"{node_s / bare_s:.2f}",
        "1.25",
        f"{node_s:.0f} s, script {bare_s:.0f} s, each with its drain and the kubelet's restart; the whole command, "
        f"which judges the cluster first, {whole_s:.0f} s",
    )


def _bare(bench: Bench) -> None:
    """The script on worker-1, with the drain before it and the uncordon after it."""
    from tests.bench.__main__ import KUBECTL

    drain = "--ignore-daemonsets --delete-emptydir-data --timeout=600s"
    bench.on("control-1", f"{KUBECTL} drain worker-1 {drain}")
    bench.on("worker-1", "cat >/run/bare.sh", stdin=(HERE / "bare_upgrade.sh").read_text())
    bench.on("worker-1", f"sh /run/bare.sh http://mirror.lab {NEW}")
    version = "$(kubelet --version | cut -d' ' -f2)"
    wait = f"{KUBECTL} wait --timeout=600s node/worker-1"
    of = f"--for=jsonpath='{{.status.nodeInfo.kubeletVersion}}'={version}"
    # The kubelet of the control plane has the same version.
    bench.on("control-1", f"{wait} {of} && {wait} --for=condition=Ready && {KUBECTL} uncordon worker-1")


def _watched(
    bench: Bench, machine: str, scheme: str = "http", port: int = PORT, path: str = "/"
) -> AbstractContextManager[availability.Prober]:
    groups = yaml.safe_load((bench.folder / "inventory/hosts.yml").read_text())["all"]["children"].values()
    host = next(group["hosts"][machine]["ansible_host"] for group in groups if machine in group["hosts"])
    return availability.watched(f"{scheme}://{host}:{port}{path}")


if __name__ == "__main__":
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpunodes-bench-") as scratch:
        for row in measure(Path(scratch)):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    show(rows)
