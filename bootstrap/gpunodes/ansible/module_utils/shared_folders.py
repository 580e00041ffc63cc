"""The folders that a storage server shares. They hold users' data: they are created, and removed only while empty."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from . import ledger
from .problem import MachineProblem
from .report import Difference, Report

SECTION = "nfs_server"
_MODE = 0o1777
"""As /tmp: pods have any user, and root of a pod is nobody (root_squash). Nobody removes the files of others."""
_PARENT_MODE = 0o755
# The user nobody (exports(5), anonuid): with fs.protected_regular a node's kernel lets a pod's root, whose files are
# nobody's here, open files in such a folder only if it is nobody's, too (Documentation/admin-guide/sysctl/fs.rst).
_OWNER = 65534
_UNFINISHED = ".gpunodes-new"
"""What a folder's name ends with until it has its owner and mode: one that has its name stays as it is."""


def create(paths: Sequence[str], check: bool) -> Report:
    """Create the folders that are missing; raises MachineProblem for a path that is something else.

    Existing ones stay as they are: their owner decided who may write.
    """
    report = Report()
    path = ledger.path_of(SECTION)
    for folder in paths:
        _check(folder)
        missing = _missing(folder)
        if missing:
            report.add(f"create {folder}", *(Difference("folders", {}, {each: "present"}) for each in missing))
        if check or not missing:
            continue
        notes = ledger.load(path)
        notes.shared += [each for each in missing if each not in notes.shared]
        notes.save(path)
        for each in missing[:-1]:
            os.mkdir(each, _PARENT_MODE)
        _make_shared(folder)
    return report


def _make_shared(folder: str) -> None:
    """Make a folder that has its owner and mode when it gets its name, also after a run that was killed meanwhile."""
    made = f"{folder}{_UNFINISHED}"
    _forget(made)
    os.mkdir(made, _PARENT_MODE)
    _open_to_all(made)
    os.rename(made, folder)


def _forget(unfinished: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.rmdir(unfinished)


def _open_to_all(folder: str) -> None:
    """Give a new folder its owner, and its mode, which the umask limits for mkdir; never what a link there leads to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(descriptor, _OWNER, _OWNER)
        os.fchmod(descriptor, _MODE)
    finally:
        os.close(descriptor)


def remove(check: bool) -> Report:
    """Remove the folders that gpunodes created, if they are empty."""
    report = Report()
    gone: set[str] = set()
    for folder in sorted(ledger.load(ledger.path_of(SECTION)).shared, key=len, reverse=True):
        if not check:
            _forget(f"{folder}{_UNFINISHED}")
        # In check mode those in it still exist.
        if os.path.islink(folder) or not os.path.isdir(folder):
            continue
        if {f"{folder}/{name}" for name in os.listdir(folder)} - gone:
            continue
        gone.add(folder)
        report.add(f"remove {folder}", Difference("folders", {folder: "present"}, {}))
        if not check:
            # A file that appeared just now keeps it.
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return report


def _check(folder: str) -> None:
    if not os.path.isabs(folder) or os.path.normpath(folder) != folder:
        raise MachineProblem(f"{folder!r} cannot be shared", "an absolute path without . and ..")
    for each in [*_parents(folder), folder]:
        try:
            mode = os.lstat(each).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no folder"
            remedy = "name its target in gpunodes_storage" if stat.S_ISLNK(mode) else "choose another path"
            raise MachineProblem(f"{each} is {kind}", f"a folder, or nothing, at {folder}", remedy)


def _parents(folder: str) -> list[str]:
    names = folder.strip("/").split("/")
    return ["/" + "/".join(names[:count]) for count in range(1, len(names))]


def _missing(folder: str) -> list[str]:
    return [each for each in [*_parents(folder), folder] if not os.path.lexists(each)]
