"""NFS shares that are mounted on this machine, from the kernel's list: a server that hangs does not stop reading it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

from . import disk
from .problem import MachineProblem

MOUNTS = "/proc/self/mounts"
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
    for source, point, *more in _of_nfs(mounts):
        if more:
            address = re.search(r"(?:^|,)addr=([^,]+)", more[0])
            names = [source, f"{address[1]}:/{source.partition(':/')[2]}"] if address else [source]
            if any(_is_in(name, share) for name in names for share in wanted):
                found.append((source, point))
    return found


def of_others(mounts: str) -> list[str]:
    """The mount points of NFS in /proc/mounts or /etc/fstab (fstab(5)), without those of gpunodes' volumes for pods."""
    return [point for _, point, *_ in _of_nfs(mounts) if not _OF_PODS.search(point)]


def _of_nfs(mounts: str) -> Iterator[list[str]]:
    """Source, mount point and, if there are any, options and more of each mount of NFS."""
    for source, *more in (line.split() for line in mounts.splitlines() if line.strip()):
        if not source.startswith("#") and more[1:2] in (["nfs"], ["nfs4"]):
            yield [source, more[0], *more[2:]]


def _is_in(source: str, share: str) -> bool:
    return source.rstrip("/") == share.rstrip("/") or source.startswith(share.rstrip("/") + "/")
