"""``python -m gpunodes.autoscale``: the power server in its pod, beside the autoscaler."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from gpunodes.autoscale import plan, service
from gpunodes.autoscale.power import BmcMachines
from gpunodes.autoscale.server import PowerServer
from gpunodes.autoscale.store import Store
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import ExitCode, GpunodesError, sentence
from gpunodes.model import printable

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its account (kubernetes.io, "Accessing the Kubernetes API from a Pod")."""
_END_S = 5.0
"""Seconds that calls get at the end."""
log = logging.getLogger("gpunodes.autoscale")


class _Printable(logging.Formatter):
    """Each entry is one line without control characters: nodes and BMCs write texts that are logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> int:
    """Run until SIGTERM; the exit status."""
    arguments = _arguments()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Printable("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _serve(arguments, stop)
    except GpunodesError as error:
        log.error("%s", sentence(error))
        return ExitCode.FAILED


def _serve(arguments: argparse.Namespace, stop: threading.Event) -> int:
    text = arguments.plan.read_text(encoding="utf-8")
    planned = plan.parse(json.loads(text))
    kubeconfig = arguments.kubeconfig or _own_kubeconfig()
    session = Session(connection.here(sys.executable, kubeconfig))
    store = Store(session)
    leases = Leases(store, "the power server")
    server = PowerServer(planned, store, BmcMachines(planned, arguments.passwords, leases, store.ask_off))
    server.begin()
    listening = service.start(server, arguments.listen)
    log.info("%d machines in %d pools", len(planned.machines), len(planned.pools))
    try:
        while not stop.wait(server.plan.scan_s) and not server.overtaken:
            try:
                # The kubelet replaces the file after `gpunodes autoscale up`.
                if (new := arguments.plan.read_text(encoding="utf-8")) != text:
                    server.replan(plan.parse(json.loads(new)))
                    text = new
                server.look()
            except GpunodesError as error:
                log.warning("%s", sentence(error))
        if server.overtaken:
            log.error("%s", server.overtaken)
        return ExitCode.FAILED if server.overtaken else ExitCode.DONE
    finally:
        listening.stop(grace=_END_S).wait()
        leases.close()
        session.close()


def _own_kubeconfig() -> Path:
    """A kubeconfig of the pod's own account; its token stays in the kubelet's file, which is renewed."""
    ca = base64.b64encode((_ACCOUNT / "ca.crt").read_bytes()).decode()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    address = f"[{host}]" if ":" in host else host
    path = Path("/tmp/kubeconfig")  # noqa: S108 - in memory, and the pod's own
    path.write_text(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: own\n  cluster:\n"
        f"    certificate-authority-data: {ca}\n    server: https://{address}:{port}\n"
        f"users:\n- name: own\n  user:\n    tokenFile: {_ACCOUNT / 'token'}\n"
        "contexts:\n- name: own\n  context: {cluster: own, user: own}\ncurrent-context: own\n",
        encoding="utf-8",
    )
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpunodes-power", description=__doc__)
    parser.add_argument("--plan", type=Path, default=Path("/etc/gpunodes/plan.json"))
    parser.add_argument("--passwords", type=Path, default=Path("/run/gpunodes/bmc"))
    parser.add_argument("--kubeconfig", type=Path, help="of an account; default: that of the pod")
    parser.add_argument("--listen", default=service.ADDRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
