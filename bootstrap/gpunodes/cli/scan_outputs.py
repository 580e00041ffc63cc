"""The options of `gpunodes health` for monitoring: a file with metrics, and a notice of changed states.

Nothing heavy is imported here: `gpunodes health --from` must stay quick.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from gpunodes.cli import terminal
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.health.model import Verdict

if TYPE_CHECKING:
    from gpunodes.engine.webhook import Webhook

_Command = TypeVar("_Command", bound=Callable[..., Any])
FORMS = ("json", "slack", "alertmanager")
_VARIABLE = "GPUNODES_NOTIFY_URL"


@dataclass(frozen=True, slots=True)
class ScanOutputs:
    """Where the verdicts of a scan go, besides the terminal."""

    metrics: Path | None = None
    notice: Webhook | None = None
    form: str = ""
    given: tuple[str, ...] = ()
    """The options that were given: not those of the environment."""

    def any(self) -> bool:
        """Whether there is any."""
        return bool(self.metrics or self.notice)

    def refuse(self, why: str, *, metrics: bool = False) -> ScanOutputs:
        """Without notices, and with ``metrics`` without those, too; raises WrongInput if such an option was given."""
        if wrong := [option for option in self.given if metrics or option != "--metrics"]:
            raise WrongInput(why, f"no {wrong[0]} with it", "leave one out")
        return ScanOutputs(None if metrics else self.metrics)

    def write(self, verdicts: Sequence[Verdict], began: float, cluster: str | None) -> None:
        """Write the metrics and send the notice; ``began`` is monotonic. A failure is a warning.

        ``cluster`` is None for saved logs.
        """
        if not self.any():
            return
        from gpunodes.operations import scan_reports
        from gpunodes.views import metrics, notice

        if self.metrics:
            with warning():
                summary = scan_reports.summary(verdicts, began, cluster)
                scan_reports.write(self.metrics, metrics.scan(summary))
        if self.notice and cluster is not None:
            form = self.form or notice.form_of(self.notice.host, self.notice.path)
            moment = time.time()
            with warning():
                scan_reports.notify(self.notice, cluster, verdicts, lambda changes: notice.body(form, changes, moment))


def options(command: _Command) -> _Command:
    """The options, checked before any scan and passed as ``outputs``."""

    @click.option(
        "--metrics",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the verdicts to this file, for the textfile collector of Prometheus' node exporter.",
    )
    @click.option(
        "--notify",
        metavar="URL",
        envvar=_VARIABLE,
        help="Post the machines whose state changed to a webhook. Other users can see arguments: an address that is a "
        f"secret belongs in the variable {_VARIABLE}.",
    )
    @click.option(
        "--notify-form",
        type=click.Choice(FORMS),
        help="The form of the notice; by default that of Slack or Alertmanager for their addresses, otherwise json.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, metrics: Path | None, notify: str | None, notify_form: str | None, **kwargs: Any) -> Any:
        return command(*args, outputs=_checked(metrics, notify, notify_form), **kwargs)

    return wrapped  # type: ignore[return-value]  # a decorator that changes the parameters cannot say so


def _checked(metrics: Path | None, notify: str | None, form: str | None) -> ScanOutputs:
    """The outputs; raises WrongInput for those that cannot be used."""
    source = click.get_current_context().get_parameter_source
    given = {"--metrics": "metrics", "--notify": "notify", "--notify-form": "notify_form"}
    if form and not notify:
        raise WrongInput("--notify-form is for notices", "--notify, or GPUNODES_NOTIFY_URL", "add it, or leave it out")
    if metrics:
        from gpunodes.engine import metrics_file

        metrics_file.check(metrics)
    return ScanOutputs(
        metrics,
        _webhook(notify) if notify else None,
        form or "",
        tuple(option for option, name in given.items() if source(name) is ParameterSource.COMMANDLINE),
    )


def _webhook(url: str) -> Webhook:
    from gpunodes.engine import webhook

    return webhook.webhook(url)


@contextlib.contextmanager
def warning() -> Iterator[None]:
    """While inside, an error is a warning: it changes no verdict."""
    try:
        yield
    except GpunodesError as problem:
        terminal.line(f"warning: {problem}", err=True)
