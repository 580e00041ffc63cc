"""Errors of the cluster's API."""

from __future__ import annotations

from gpunodes.errors import GpunodesError


class NoResponse(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The control plane does not respond."""


class NoCluster(NoResponse):
    """The control-plane machine runs no cluster."""


class NoSession(NoResponse):
    """The control-plane machine is unreachable, or refuses the login."""


class Refused(GpunodesError):  # noqa: N818 - as above
    """The API returned an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
