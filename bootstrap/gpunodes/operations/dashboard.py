"""The dashboard: Headlamp in the cluster, reached over SSH, with a token of an account that may view."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from gpunodes.engine import control_planes
from gpunodes.engine.cluster.tokens import Token, Tokens
from gpunodes.engine.cluster.workloads import Workloads
from gpunodes.engine.remote import forward
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory

# Names of the template roles/addon/templates/headlamp.yml.j2.
NAMESPACE = "gpunodes-headlamp"
DEPLOYMENT = "headlamp"
ACCOUNT = "viewer"
_LABEL = "app=headlamp"
_PORT = 4466
TOKEN_S = 3600
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard that can be opened."""

    url: str
    token: Token


def run(inventory: Inventory, local: int, show: Callable[[Dashboard], None]) -> None:
    """Open a port of this computer to the dashboard, and keep it until Ctrl-C, SIGTERM or SIGHUP.

    ``show`` is called once, when it answers. Raises WrongInput if it is not installed or the port ``local`` is in use,
    and GpunodesError if it does not answer, or when the connection breaks.
    """
    # Otherwise ssh, which is another process, would stay.
    before = {each: signal.signal(each, signal.default_int_handler) for each in _SIGNALS}
    try:
        _open(inventory, local, show)
    except KeyboardInterrupt:
        return
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _open(inventory: Inventory, local: int, show: Callable[[Dashboard], None]) -> None:
    with control_planes.connected(inventory, Tokens) as api:
        address = _address(Workloads(api.session))
        machine = control_planes.used(inventory, api.session).machine
        with forward.opened(machine, inventory.connection(machine.name), address, _PORT, local) as opened:
            _check(opened, local)
            show(Dashboard(f"http://127.0.0.1:{local}", api.token(NAMESPACE, ACCOUNT, TOKEN_S)))
            api.session.close()
            opened.follow()


def _address(api: Workloads) -> str:
    """The address of Headlamp's pod: its Service may lead to a pod that a node made."""
    deployment = api.deployment_of(NAMESPACE, DEPLOYMENT)
    if deployment is None:
        raise WrongInput(
            "the dashboard is not installed in this cluster",
            "the add-on headlamp",
            "run `gpunodes addon up headlamp`",
        )
    found = api.serving_pod(NAMESPACE, _LABEL, deployment)
    if found is None:
        raise GpunodesError("Headlamp has no pod that is ready", "one that is", "see `gpunodes addon verify headlamp`")
    return str(found["status"].get("podIP") or "")


def _check(opened: forward.Forward, local: int) -> None:
    """Raise GpunodesError unless an HTTP server answers."""
    if why := forward.unanswered(local, "/"):
        raise GpunodesError(
            opened.lost(f"Headlamp does not answer: {why}").problem.found,
            "a dashboard that runs, and an SSH server that forwards ports",
            "see `gpunodes addon verify headlamp`, and AllowTcpForwarding in the machine's sshd_config",
        )
