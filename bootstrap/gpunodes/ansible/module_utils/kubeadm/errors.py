"""Why kubeadm or the kubelet failed, from their output."""

from __future__ import annotations

import re

from .. import causes, tree
from ..causes import Program
from ..problem import MachineProblem, Problem
from ..process import CommandResult, run

_TIMED_OUT = 124
"""Exit code of a program that ``process.run`` stopped at its time limit."""
_LONGEST_CHECK = 500
"""Characters of a failed check that are shown."""


def failure(verb: str, result: CommandResult, kubelet: Problem | None) -> MachineProblem:
    """Why kubeadm failed; with the cause in the kubelet's journal if kubeadm only waited for the kubelet or the API."""
    cause = kubeadm_error(result.text)
    waited = result.code == _TIMED_OUT or re.search(r"kubelet|timed out|deadline|wait|connect", cause.found)
    found = f"kubeadm {verb}: {cause.found}"
    # kubeadm's own checks fail before it starts the kubelet.
    if kubelet and waited and not cause.found.startswith("[ERROR "):
        return MachineProblem(f"{found}; kubelet: {kubelet.found}", "", kubelet.remedy or cause.remedy, result.text)
    return MachineProblem(found, "", cause.remedy, result.text)


def kubeadm_error(text: str) -> Problem:
    """kubeadm's error: its failed checks, or else the line that names the phase."""
    checks = [line.strip() for line in text.splitlines() if re.match(r"\s*\[ERROR [^]]+\]: ", line)]
    if checks:
        found = list(map(_check, checks))
        remedies = dict.fromkeys(each.remedy for each in found if each.remedy)
        return Problem("; ".join(dict.fromkeys(each.found for each in found)), remedy="; ".join(remedies))
    noise = ("To see the stack trace", "k8s.io/", "main.", "runtime.", "\t")
    plain = "\n".join(line for line in text.splitlines() if not line.startswith(noise))
    cause = causes.of(Program.KUBEADM, plain)
    return Problem(cause.found.removeprefix("error: "), remedy=cause.remedy)


def _check(check: str) -> Problem:
    """A failed check. One that lists the same error for several images is shortened to the first one."""
    first, more, _ = check.partition(", failed to pull image ")
    image, separator, pull = first.partition(": output: ")
    cause = causes.find(Program.IMAGE, pull if separator else first) if "ImagePull]" in first else None
    if cause and separator:
        first = f"{image}: {cause.found}"
    others = "; and others" if more else ""
    return Problem(tree.shown(f"{first}{others}"[:_LONGEST_CHECK]), remedy=cause.remedy if cause else "")


def kubelet_error(since: float | None = None) -> Problem | None:
    """The cause in the kubelet's journal; None if it has no error."""
    argv = ["journalctl", "--unit=kubelet", "--boot", "--lines=300", "--output=cat", "--no-pager"]
    return parse_kubelet(run([*argv, f"--since=@{since:.0f}"] if since else argv).out)


def parse_kubelet(journal: str) -> Problem | None:
    """Why the kubelet exited if it did, else why it cannot pull an image, else its last error line.

    Its lines are klog's: ``E1121 12:00:01.234567  890 file.go:12] "message" err="..."``; E is an error, F is fatal.
    """
    errors = []
    for line in journal.splitlines():
        found = re.match(r"[EF]\d{4} [\d:.]+\s+\d+ \S+\] (.*)", line)
        if found:
            errors.append(found.group(1))
    if not errors:
        return None
    fatal = [line for line in errors if line.startswith('"command failed"')]
    if fatal:
        plain = re.search(r'err="((?:[^"\\]|\\.)*)"', fatal[-1])
        text = plain.group(1).replace('\\"', '"') if plain else fatal[-1]
        return causes.of(Program.KUBELET, text)
    # Until the API server runs, the kubelet reports that it cannot connect to it: only pulls of images count.
    return causes.of_pull("\n".join(line for line in errors if "pull" in line)) or causes.of(
        Program.KUBELET, errors[-1]
    )
