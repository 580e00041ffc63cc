"""Small readers of files and programs. None of them raises for what is missing, except as described."""

import os
import select
import subprocess
import time
from typing import IO, Dict, Iterator, List, Optional, cast

from .options import ProbeOptions

PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"


def text(path: str, limit: int = 65536) -> str:
    """The text of a small file, "" for one that is missing or unreadable."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def number(text: str) -> Optional[int]:
    try:
        return int(text.strip(), 0)
    except ValueError:
        return None


def names(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def program(options: ProbeOptions, name: str) -> Optional[str]:
    """The path of a program of the machine."""
    for folder in PROGRAMS.split(":"):
        path = options.path(folder.lstrip("/") + "/" + name)
        if os.access(path, os.X_OK):
            return path
    return None


def environment() -> Dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    variables.update(PATH=PROGRAMS, LC_ALL="C", LANG="C", LANGUAGE="C")
    return variables


class SlowError(Exception):
    """A program did not end within its time limit."""


def output(argv: List[str], limit_s: float) -> Iterator[str]:
    """The lines that a program prints; raises SlowError after ``limit_s``. Closing the iterator kills the program."""
    deadline = time.monotonic() + limit_s
    with open(os.devnull, "r+b") as null:
        process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null, env=environment())
    stream = cast(IO[bytes], process.stdout)  # Popen is called with a pipe
    incomplete_line = b""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise SlowError("{} did not end within {:.0f} s".format(argv[0], limit_s))
            chunk = os.read(stream.fileno(), 1 << 16)
            *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
            if len(incomplete_line) > 1 << 20:
                incomplete_line = b""
            for line in lines:
                yield line.decode("utf-8", "replace")
            if not chunk:
                return
    finally:
        process.kill()
        stream.close()
