"""Containers of the control plane's static pods, through the container runtime: they exist without an API."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .problem import MachineProblem
from .process import CommandResult, last_line, run

_SOCKET = "/run/containerd/containerd.sock"
_DOCKER_SOCKET = "/run/cri-dockerd.sock"
_MARGIN_S = 15
"""Seconds that crictl itself may take longer than the program that it runs."""


def runtime_socket() -> str:
    """The container runtime's socket: that of cri-dockerd if it exists, else containerd's."""
    return f"unix://{_DOCKER_SOCKET if is_docker() else _SOCKET}"


def is_docker() -> bool:
    """Whether the kubelet uses Docker."""
    return os.path.exists(_DOCKER_SOCKET)


def crictl(arguments: Sequence[str], timeout_s: float = 60) -> CommandResult:
    """Run crictl on the runtime of this machine."""
    return run(["crictl", f"--runtime-endpoint={runtime_socket()}", "--timeout=30s", *arguments], timeout_s)


def ids(name: str, every: bool = False) -> list[str]:
    """The ids of the containers ``name`` of kube-system, the newest first; ``every``: also those that have ended.

    Raises MachineProblem if the runtime does not respond: "none" would be a guess.
    """
    filters = ["--name", f"^{name}$", "--label", "io.kubernetes.pod.namespace=kube-system"]
    done = crictl(["ps", *(["--all"] if every else []), "--quiet", *filters])
    if not done.ok:
        raise MachineProblem(
            f"the container runtime does not list its containers: {last_line(done.err) or last_line(done.out)}",
            "a container runtime that responds",
            "see `systemctl status containerd` (or docker and cri-dockerd), then run the command again",
        )
    return done.out.split()


def execute(container: str, argv: Sequence[str], timeout_s: int) -> CommandResult:
    """Run a program in a container. The runtime itself ends it after ``timeout_s``, even if this process is killed."""
    return crictl(["exec", "--sync", f"--timeout={timeout_s}", container, *argv], timeout_s + _MARGIN_S)
