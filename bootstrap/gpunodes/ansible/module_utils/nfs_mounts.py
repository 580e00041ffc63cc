"""NFS shares that are mounted on this machine, from the kernel's list: a server that hangs does not stop reading it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from . import disk
from .problem import MachineProblem

MOUNTS = "/proc/self/mounts"
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
    """The mounts of these shares, and of folders in them, by /proc/mounts: source and mount point."""
    rows = [line.split(" ") for line in mounts.splitlines()]
    found = [(row[0], row[1]) for row in rows if len(row) > 2 and row[2] in {"nfs", "nfs4"}]  # noqa: PLR2004 - the type is the third field
    return [each for each in found if any(_is_in(each[0], share) for share in shares)]


def _is_in(source: str, share: str) -> bool:
    return source.rstrip("/") == share.rstrip("/") or source.startswith(share.rstrip("/") + "/")
