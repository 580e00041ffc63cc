"""Files that gpunodes writes completely."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Mapping

from .. import disk, ledger, packages, report
from ..problem import MachineProblem
from ..process import PATH, must, run
from .changes import Changes
from .spec import File, Generated, filled


def write(changes: Changes, file: File) -> bool:
    """Bring a file into its desired state; whether that was a change."""
    mode = int(file.mode, 8)
    owner = pwd.getpwnam(file.owner)
    try:
        found = os.lstat(file.path)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found and not stat.S_ISREG(found.st_mode):
        raise MachineProblem(f"{file.path} is not a regular file", "a file, or nothing", "move it away")
    before = disk.read(file.path)
    same = found is not None and (stat.S_IMODE(found.st_mode), found.st_uid) == (mode, owner.pw_uid)
    if before == file.content and same:
        return False
    old = (
        ledger.OldFile(before, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
        if found
        else ledger.OldFile(None)
    )
    changes.ledger.note_file(file.path, old)
    changes.ledger.note_directories(missing_parents(file.path))
    changes.note_restarts()
    if changes.step(f"write {file.path}", *report.of_file(file.path, file.content, mode, owner.pw_uid)):
        os.makedirs(os.path.dirname(file.path), mode=0o755, exist_ok=True)
        if file.validate:
            _validate(file)
        disk.write(file.path, file.content, mode, owner.pw_uid, owner.pw_gid)
    return True


def generate(changes: Changes, generated: Generated) -> None:
    """Run a program that generates a file on a copy, and write the result like any other file."""
    if generated.when_exists and not os.path.exists(generated.when_exists):
        return
    if changes.check and not shutil.which(generated.command[0], path=PATH):
        difference = report.of_file(generated.path, report.GENERATED, int(generated.mode, 8))
        changes.step(f"write {generated.path}", *difference)
        return
    with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
        names = {"%o": f"{folder}/{os.path.basename(generated.path)}", "%i": f"{folder}/input"}
        for source, copy in ((generated.path, names["%o"]), (generated.input, names["%i"])):
            if source and os.path.exists(source):
                shutil.copyfile(source, copy)
        command = [generated.command[0], *(filled(argument, names) for argument in generated.command[1:])]
        must(command)
        content = disk.read(names["%o"])
    if content is None:
        raise MachineProblem(f"`{command[0]}` did not write {generated.path}", "a file", f"run `{' '.join(command)}`")
    write(changes, File(generated.path, content, generated.mode))


def remove(changes: Changes, path: str) -> None:
    """Remove a file that gpunodes created, or an empty folder; what existed before is kept."""
    if path.endswith("/"):
        _remove_folder(changes, path.rstrip("/"))
        return
    old = changes.ledger.files.get(path)
    if old is None or old.content is not None or not os.path.lexists(path):
        return
    changes.note_restarts()
    if changes.step(f"remove {path}", *report.of_file(path, None)):
        disk.remove(path)


def _remove_folder(changes: Changes, path: str) -> None:
    if path not in changes.ledger.directories or not os.path.isdir(path) or os.listdir(path):
        return
    if changes.step(f"remove {path}", report.Difference("folders", {path: "present"}, {})):
        # A file that appeared just now keeps it.
        with contextlib.suppress(OSError):
            os.rmdir(path)


def variant(file: File, versions: Mapping[str, str]) -> File:
    """``file`` with the content for the version of its package; raises MachineProblem if no content matches."""
    if not file.package:
        return file
    version = versions.get(file.package, "")
    for pattern, content in file.contents.items():
        if packages.fits(packages.RequestedPackage(file.package, pattern), version) or version == "newest":
            return File(file.path, content, file.mode, file.owner, validate=file.validate)
    raise MachineProblem(
        f"{file.package} is {version}", f"one of {', '.join(file.contents)}", "use a source that has such a version"
    )


def missing_parents(path: str) -> list[str]:
    """The missing folders above ``path``, outermost first."""
    missing: list[str] = []
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def _validate(file: File) -> None:
    """Raise MachineProblem if the file's command rejects its content."""
    trial = f"{file.path}.gpunodes-trial"
    disk.write(trial, file.content, 0o600)
    try:
        result = run([argument.replace("%s", trial) for argument in file.validate])
    finally:
        os.unlink(trial)
    if not result.ok:
        raise MachineProblem(f"`{file.validate[0]}` rejects the new {file.path}: {result.text.strip()}")
