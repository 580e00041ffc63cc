"""Why kubeadm, the kubelet or a component of the control plane failed, from their output."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence

from .. import causes, tree
from ..causes import Program
from ..problem import MachineProblem, Problem
from ..process import CommandResult, run

_TIMED_OUT = 124
"""Exit code of a program that ``process.run`` stopped at its time limit."""
_LONGEST_CHECK = 500
"""Characters of a failed check that are shown."""
_WITHOUT_API = r'node \\?"[^"]*" not found|node is not registered yet'
"""What the kubelet repeats until the API has its node: never a cause."""
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
"""Each needs those before it: without etcd the others end as well."""
LOGS = "/var/log/pods"
_COMMAND_FAILED = '"command failed"'
"""What Kubernetes' programs write last (component-base/cli/run.go)."""
_LOST = '"leaderelection lost"'
_END_OF_LOG = 100_000
"""Bytes of a component's log that are read."""


def failure(verb: str, result: CommandResult, waited_for: Problem | None) -> MachineProblem:
    """Why kubeadm failed; with ``waited_for``, what ``cause_of_wait`` found, if kubeadm only waited for others."""
    cause = kubeadm_error(result.text)
    waited = result.code == _TIMED_OUT or re.search(r"kubelet|timed out|deadline|wait|connect", cause.found)
    found = f"kubeadm {verb}: {cause.found}"
    # kubeadm's own checks fail before it starts the kubelet.
    if waited_for and waited and not cause.found.startswith("[ERROR "):
        return MachineProblem(f"{found}; {waited_for.found}", "", waited_for.remedy or cause.remedy, result.text)
    return MachineProblem(found, "", cause.remedy, result.text)


def cause_of_wait(since: float) -> Problem | None:
    """Why the control plane on this machine does not work: a component that ended, else the kubelet's error.

    ``since`` is in seconds of this machine's clock. None if neither has an error.
    """
    if component := component_error(since):
        return component
    kubelet = kubelet_error(since)
    return Problem(f"kubelet: {kubelet.found}", remedy=kubelet.remedy) if kubelet else None


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
    fatal = [line for line in errors if line.startswith(_COMMAND_FAILED)]
    if fatal:
        return causes.of(Program.KUBELET, _command_error(fatal[-1]))
    # Until the API server runs, the kubelet reports that it cannot connect to it: only pulls of images count.
    if pull := causes.of_pull("\n".join(line for line in errors if "pull" in line)):
        return pull
    telling = [line for line in errors if not re.search(_WITHOUT_API, line)]
    return causes.of(Program.KUBELET, (telling or errors)[-1])


def component_error(since: float, names: Sequence[str] = COMPONENTS) -> Problem | None:
    """The first of these components of this machine's control plane that ended by an error after ``since``, with it.

    From the files that the kubelet names, which are there without an API or a runtime. None if they have no error: a
    component may also be slow, or not have been started.

    Source: kubelet 1.36, pkg/kubelet/kuberuntime/helpers.go: NAMESPACE_POD_UID/CONTAINER/ATTEMPT.log.
    """
    for name in names:
        for _, error in _errors_of(name, since):
            return Problem(f"{name} ended: {error.found}", remedy=error.remedy)
    return None


def refuses_argument(name: str, since: float) -> bool:
    """Whether two attempts of a component ended after ``since`` because of an argument, with which none ever starts.

    One may be of a pod before: the kubelet may start it once more before it sees that its manifest was replaced.
    """
    refused = [path for path, error in _errors_of(name, since) if re.search(causes.BAD_ARGUMENT, error.found)]
    return len(refused) > 1 or any(_is_second_of_new_pod(path, since) for path in refused)


def _is_second_of_new_pod(path: str, since: float) -> bool:
    """Whether a log is of a pod that came after ``since``, and of its second or a later attempt.

    The kubelet removes the log of an ended attempt as soon as the next one has ended: two are there for a second only.
    """
    if os.path.basename(path) == "0.log":
        return False
    try:
        return os.stat(os.path.dirname(os.path.dirname(path))).st_mtime >= since
    except OSError:
        return False


def parse_component(log: str) -> Problem | None:
    """Why a component ended, from its log as containerd or Docker keeps it; None if the log has no such line."""
    fatal = [text for line in log.splitlines() if (text := _fatal(_written(line)))]
    return causes.of(Program.COMPONENT, fatal[-1]) if fatal else None


def _command_error(message: str) -> str:
    plain = re.search(r'err="((?:[^"\\]|\\.)*)"', message)
    return plain.group(1).replace('\\"', '"') if plain else message


def _errors_of(name: str, since: float) -> Iterator[tuple[str, Problem]]:
    """The logs of a component's attempts that ended after ``since``, the newest first, with why; not one that runs."""
    written = {}
    for path in glob.glob(f"{LOGS}/kube-system_{name}-*/{name}/*.log"):
        with contextlib.suppress(OSError):  # the kubelet removes those of old attempts
            written[path] = os.stat(path).st_mtime
    for path in sorted(written, key=written.__getitem__, reverse=True):
        if written[path] >= since and (error := parse_component(_end_of(path))):
            yield path, error


def _end_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_OF_LOG))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _written(line: str) -> str:
    """A line of a log without what the runtime adds: containerd a time and a stream, Docker an object of JSON."""
    if line.startswith('{"log":'):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["log"]).rstrip("\n")
    return re.sub(r"^\S+ std(?:out|err) [FP] ", "", line, count=1)


def _fatal(line: str) -> str:
    """The error with which a program ended, if this line has it, else "": klog's, etcd's (zap), or the Go runtime's."""
    if klog := re.match(r"([EF])\d{4} [\d:.]+\s+\d+ \S+\] (.*)", line):
        severity, message = klog.groups()
        if message.startswith(_COMMAND_FAILED):
            return _command_error(message)
        return message if severity == "F" or message.startswith(_LOST) else ""
    if re.match(r'\{"level":"(fatal|panic)"', line):
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))
    plain = re.match(r"(?:Error: |panic: |fatal error: |flag provided but not defined: ).*", line)
    return plain.group() if plain else ""
