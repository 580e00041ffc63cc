"""Why kubeadm or the kubelet failed, from their output."""

from __future__ import annotations

import re

from ..process import CommandResult, run

_TIMED_OUT = 124
"""Exit code of a program that ``process.run`` stopped at its time limit."""


def failure(result: CommandResult, kubelet: str) -> str:
    """Why kubeadm failed; with the kubelet's error if kubeadm only timed out."""
    message = kubeadm_error(result.text)
    timed_out = result.code == _TIMED_OUT or re.search(r"kubelet|timed out|deadline|wait|connect", message)
    return f"{message}; kubelet: {kubelet}" if kubelet and timed_out else message


def kubeadm_error(text: str) -> str:
    """kubeadm's error: its failed checks, or else the line that names the phase."""
    checks = [line.strip() for line in text.splitlines() if re.match(r"\s*\[ERROR [^]]+\]: ", line)]
    if checks:
        return "; ".join(map(_first_of_many, checks))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.match(r"(error: )?error execution phase ", line) or line.startswith("error: "):
            return line[len("error: ") :] if line.startswith("error: ") else line
    noise = ("To see the stack trace", "k8s.io/", "main.", "runtime.", "\t")
    return next((line for line in reversed(lines) if not line.startswith(noise)), "it failed without output")


def _first_of_many(check: str) -> str:
    """Shorten a check that lists the same error for several images to the first one."""
    first, more, _ = check.partition(", failed to pull image ")
    return f"{first}; and others" if more else check


def kubelet_error(since: float | None = None) -> str:
    """The kubelet's last error, "" if it has none: why it exited if it did, else its last error line."""
    argv = ["journalctl", "--unit=kubelet", "--boot", "--lines=300", "--output=cat", "--no-pager"]
    return parse_kubelet(run([*argv, f"--since=@{since:.0f}"] if since else argv).out)


def parse_kubelet(journal: str) -> str:
    """Parse klog lines: ``E1121 12:00:01.234567  890 file.go:12] "message" err="..."``; E is an error, F is fatal."""
    errors = []
    for line in journal.splitlines():
        found = re.match(r"[EF]\d{4} [\d:.]+\s+\d+ \S+\] (.*)", line)
        if found:
            errors.append(found.group(1))
    fatal = [line for line in errors if line.startswith('"command failed"')]
    text = (fatal or errors or [""])[-1]
    plain = re.search(r'err="((?:[^"\\]|\\.)*)"', text)
    return plain.group(1).replace('\\"', '"') if plain and fatal else text
