"""The clients of this machine's NFS server, as the kernel has them: whatever they mounted, and wherever they run."""

from __future__ import annotations

import os
import re
import time

from . import disk, in_use, ledger
from .problem import MachineProblem
from .sockets import peers

NFSD = "/proc/fs/nfsd/clients"
PORT = 2049
SERVICE = "nfs-server"
_POLL_S = 2.0
_SHOWN = 3


def is_removed() -> bool:
    """Whether the server ends when gpunodes undoes its changes: it was not there, or did not run, before.

    One that gpunodes installed stays for exports of others.
    """
    found = ledger.load(ledger.path_of("nfs_server"))
    if found.packages:
        return not in_use.other_exports()
    return not found.services.get(SERVICE, {"active": True})["active"]


def check_unused(limit_s: float) -> None:
    """Wait until the server has no client; raises MachineProblem for those that stay."""
    deadline = time.monotonic() + limit_s
    while found := clients():
        if time.monotonic() >= deadline:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise MachineProblem(
                f"{', '.join(found[:_SHOWN])}{more} use{'' if len(found) > 1 else 's'} the NFS server of this machine",
                "no client of a server that is taken away: its programs would hang",
                # Connections that clients lost without a word, in a network that was cut: svc_age_temp_xprts in the
                # kernel's net/sunrpc/svc_xprt.c.
                "unmount there what it serves (`grep ' nfs' /proc/mounts`), or wait if nothing is mounted: within "
                "12 minutes the kernel closes connections that were cut; then run the command again",
            )
        time.sleep(_POLL_S)


def clients() -> list[str]:
    """The addresses of machines that are connected to the server, or that have state of NFS 4 there.

    A client of NFS 3 that has not used its mount for 5 minutes closes its connection, and is not among them.
    """
    return sorted({*peers(PORT), *_with_state()})


def _with_state() -> set[str]:
    """By the files ``info``, which kernels since 5.3 have for each client.

    The lease of a client that is away ends after 90 s; then kernels since 5.19 keep it as "courtesy" until another one
    wants what it holds (fs/nfsd/nfs4state.c).
    """
    found = set()
    for number in os.listdir(NFSD) if os.path.isdir(NFSD) else ():
        info = disk.read(f"{NFSD}/{number}/info") or ""
        address = re.search(r'^address: "(\[?[0-9A-Fa-f:.]{2,45}\]?):\d{1,5}"$', info, re.MULTILINE)
        status = re.search(r"^status: (\w+)$", info, re.MULTILINE)
        if address and (status is None or status[1] == "confirmed"):
            found.add(address[1].strip("[]"))
    return found
