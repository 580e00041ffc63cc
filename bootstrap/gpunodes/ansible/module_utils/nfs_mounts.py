"""NFS shares that are mounted on this machine, from the kernel's list: a server that hangs does not stop reading it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from . import disk
from .problem import MachineProblem

MOUNTS = "/proc/self/mounts"
_TYPES = ("nfs", "nfs4")
_OF_PODS = re.compile(r"/pods/[^/]+/(volumes/kubernetes\.io~nfs|volume-subpaths)/gpunodes-")
_POLL_S = 2.0


def check_unmounted(shares: Iterable[str], limit_s: float) -> None:
    """Wait until none of these shares (``SERVER:PATH``) is mounted; raises MachineProblem for those that stay."""
    wanted = list(shares)
    deadline = time.monotonic() + limit_s
    while found := mounted(disk.read(MOUNTS) or "", wanted):
        if time.monotonic() >= deadline:
            source, folder = found[0]
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise MachineProblem(
                f"{source} is mounted on {folder}{more}",
                "no mount of a share that is taken away: programs that use it would hang",
                "delete the pods that use it; `umount` what pods have not mounted; then run the command again",
            )
        time.sleep(_POLL_S)


def mounted(mounts: str, shares: Iterable[str]) -> list[tuple[str, str]]:
    """The mounts of these shares, and of folders in them, by /proc/mounts: source and mount point.

    A share counts by the name that was mounted, and by the server's address, which is among the options.
    """
    wanted, found = list(shares), []
    for row in (line.split(" ") for line in mounts.splitlines()):
        if len(row) > 3 and row[2] in _TYPES:  # noqa: PLR2004 - source, mount point, type and options
            address = re.search(r"(?:^|,)addr=([^,]+)", row[3])
            names = [row[0], f"{address[1]}:/{row[0].partition(':/')[2]}"] if address else row[:1]
            if any(_is_in(name, share) for name in names for share in wanted):
                found.append((row[0], row[1]))
    return found


def of_others(mounts: str) -> list[str]:
    """The mount points of NFS in /proc/mounts or /etc/fstab (fstab(5)), without those of gpunodes' volumes for pods."""
    rows = [line.split() for line in mounts.splitlines() if not line.lstrip().startswith("#")]
    points = [row[1] for row in rows if len(row) > 2 and row[2] in _TYPES]  # noqa: PLR2004 - source, point and type
    return [point for point in points if not _OF_PODS.search(point)]


def _is_in(source: str, share: str) -> bool:
    return source.rstrip("/") == share.rstrip("/") or source.startswith(share.rstrip("/") + "/")
