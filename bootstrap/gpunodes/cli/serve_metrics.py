"""gpunodes serve-metrics"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import complete, options, terminal


@click.command()
@click.argument("patterns", nargs=-1, metavar="[MACHINES]...", shell_complete=complete.machines)
@click.option(
    "--listen",
    default="127.0.0.1:9836",
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Where to serve the metrics; anybody who reaches it can read them.",
)
@click.option(
    "--interval",
    type=options.Number(min=10),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Time between the beginnings of two scans.",
)
@click.option(
    "--deadline",
    type=options.Number(min=1),
    metavar="SECONDS",
    help="Time limit of a scan; by default 60, plus a quarter of a second for each machine.",
)
@options.number_option("--parallel", (1, 1024), 64, "How many machines to probe at once.")
@options.inventory_option
def command(
    patterns: tuple[str, ...],
    listen: str,
    interval: float,
    deadline: float | None,
    parallel: int,
    inventory_path: Path,
) -> None:
    """Scan GPU machines again and again, and serve the verdicts to Prometheus.

    MACHINES are names, addresses, groups or patterns of the inventory; by default all machines. The metrics are those
    of `gpunodes health --metrics`, the age of the last scan, and how many scans failed; while scans fail, the last
    values stay. The command runs until SIGTERM or Ctrl-C, and changes nothing on a machine. `gpunodes help --page
    monitoring` has alert rules and a dashboard.
    """
    from gpunodes.operations import serve_metrics
    from gpunodes.views import metrics

    serve_metrics.run(
        serve_metrics.ServeOptions(inventory_path, patterns, listen, interval, deadline, parallel),
        serve_metrics.MetricsFormat(metrics.CONTENT_TYPE, metrics.served),
        terminal.progress,
    )
