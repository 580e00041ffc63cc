"""A systemd service and timer for the controller that back the cluster up and keep the newest files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpunodes.engine import encryption
from gpunodes.errors import WrongInput

NAME = "gpunodes-etcd-backup"
_TIME = r"\d{8}T\d{6}Z"


def prune(folder: Path, latest: str, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` backups in a folder that have the name ``latest`` except for its time."""
    prefix = re.sub(rf"{_TIME}\.tar$", "", latest)
    pattern = rf"{re.escape(prefix)}{_TIME}\.tar"
    found = sorted(
        each
        for each in folder.iterdir()
        if re.fullmatch(pattern, each.name) and each.is_file() and not each.is_symlink()
    )
    # The newest by its name may be another one: the clock was set back, or that of another controller is ahead.
    old = [each for each in found if each.name != latest][: max(0, len(found) - keep)]
    for each in old:
        each.unlink()
    return old


def check_calendar(text: str) -> None:
    """Raise WrongInput for a text that cannot be a calendar event of systemd, which itself checks it if it is here."""
    program = shutil.which("systemd-analyze")
    plain = text and all(each.isalnum() or each in " *:,./~-" for each in text)
    if not plain or (
        program and subprocess.run([program, "calendar", text], capture_output=True, check=False, timeout=20).returncode
    ):
        raise WrongInput(
            f"{text!r} is not a calendar event",
            "one such as daily or *-*-* 03:00 (systemd.time)",
            "correct --on-calendar",
        )


def units(
    argv: Sequence[str], user: str, folder: Path, *, keep: int, calendar: str, recipient: str = ""
) -> dict[str, str]:
    """The text of both units by file name. ``argv`` is `gpunodes etcd backup` with absolute paths."""
    check_calendar(calendar)
    if recipient:
        encryption.argv_for(recipient)
    words = [*argv, "--keep", str(keep), *(["--encrypt-to", recipient] if recipient else [])]
    service = [
        "[Unit]",
        "Description=Backs up the Kubernetes cluster of gpunodes",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=oneshot",
        f"User={user}",
        f"WorkingDirectory={_escaped(str(folder))}",
        "UMask=0077",
        f"ExecStart={' '.join(quoted(word) for word in words)}",
        "TimeoutStartSec=2h",
    ]
    timer = [
        "[Unit]",
        "Description=Backs up the Kubernetes cluster of gpunodes",
        "",
        "[Timer]",
        f"OnCalendar={calendar}",
        "RandomizedDelaySec=5min",
        # A controller that was off makes up for it when it starts.
        "Persistent=true",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return {f"{NAME}.service": "\n".join(service) + "\n", f"{NAME}.timer": "\n".join(timer) + "\n"}


def quoted(word: str) -> str:
    """A word of ExecStart (systemd.service(5), Command lines)."""
    escaped = _escaped(word).replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return escaped if escaped and not set(escaped) & set(" '\";") else f'"{escaped}"'


def _escaped(text: str) -> str:
    if not text.isprintable():
        raise WrongInput(f"{text!r} has control characters", "a plain path", "run it in another folder")
    return text.replace("%", "%%")


def absolute(program: str) -> str:
    """The program's absolute path; links stay, because an installation may move behind one."""
    return os.path.abspath(shutil.which(program) or program)  # noqa: PTH100 - pathlib follows links
