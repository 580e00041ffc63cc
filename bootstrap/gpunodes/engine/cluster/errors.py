"""Errors of the cluster's API."""

from __future__ import annotations

from typing import Any

from gpunodes import shape
from gpunodes.errors import GpunodesError


class NoResponse(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The control plane does not respond."""


class NoCluster(NoResponse):
    """No control-plane machine that responds has a cluster."""


class NoSession(NoResponse):
    """No control-plane machine is reachable and accepts the login."""


class OtherCluster(NoResponse):
    """The only machines that respond belong to another cluster."""


class Refused(GpunodesError):  # noqa: N818 - as above
    """The API returned an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TooLarge(Refused):
    """A response is larger than a connection carries; the control plane responds."""

    def __init__(self, message: str) -> None:
        super().__init__(413, message)


def invalid(found: str) -> NoResponse:
    """The error for a response that an API server does not give; ``found`` is what is wrong with it."""
    return NoResponse(
        found,
        "a Kubernetes API",
        "check the address of the control-plane machine, and which program listens there",
    )


def malformed(what: str, wrong: str) -> NoResponse:
    """The error for an object of the cluster that is not as it must be: ``what`` it is, and what is ``wrong``."""
    return invalid(f"what the cluster reports about {what} is not valid: {wrong}")


def check(found: Any, wanted: Any, what: str) -> None:
    """Raise NoResponse for an object of another shape."""
    if wrong := shape.wrong(found, wanted):
        raise malformed(what, wrong)
