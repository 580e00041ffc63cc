"""The command line. One command a file, loaded only when it is called, so that ``gpunodes --help`` stays quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gpunodes import __version__
from gpunodes.cli import terminal

if TYPE_CHECKING:
    from gpunodes.errors import GpunodesError

# Name -> one line of help. Each command is the object `command` of the module of its name; a test holds these lines
# against the commands' own help.
COMMANDS = {
    "init-master": "Make a machine the control plane of a new cluster.",
    "join": "Join machines to the cluster as workers.",
    "up": "Bring the whole inventory up: control plane and workers, prepared side by side.",
    "status": "Show the cluster's machines and how they are.",
    "kubeconfig": "Fetch the cluster's administrator kubeconfig.",
    "remove": "Empty a node, delete it from the cluster and reset its machine.",
    "reset": "Bring machines back to what they were before us.",
    "health": "Say of each GPU machine whether it is well, what to do, and why.",
    "preflight": "Say what would stop a join; nothing is touched.",
    "gpu": "Plan, install, prove and remove what machines with GPUs get.",
    "gates": "List the kubelet's feature gates that matter for GPUs.",
    "repair": "Repair machines by hand: empty, reboot by whatever it takes, prove well, give back.",
    "history": "Show what was found and done about a machine, or about all.",
    "maintenance": "Keep repairs and new pods from machines that somebody works on.",
    "power": "Switch a machine on or off by its BMC, or say whether it is on.",
    "uncordon": 'Clear "needs repair": a machine that was given up may be scheduled to, and repaired, again.',
    "lab": "Virtual machines to try gpunodes on.",
}


class LazyGroup(click.Group):
    """A group that imports a command's module, of the package ``where``, only when that command is called."""

    def __init__(self, *arguments: Any, listing: Mapping[str, str], where: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._listing = listing
        self._where = where

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._listing)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        if cmd_name not in self._listing:
            return None
        module = importlib.import_module(f"{self._where}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl(list(self._listing.items()))


@click.group(
    cls=LazyGroup,
    listing=COMMANDS,
    where="gpunodes.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="gpunodes")
def root() -> None:
    """Turn bare machines that answer on SSH into a GPU Kubernetes cluster, and keep it healthy.

    Machines come from an Ansible inventory (inventory/hosts.yml, or -i). Exit codes: 0 done, 1 failed, 2 wrong input
    and nothing touched, 3 partly done, 130 interrupted.
    """


def _fail(error: GpunodesError) -> int:
    """Say an error, as a document too where one is wanted; returns its exit code."""
    terminal.line(f"gpunodes: {error}", err=True)
    if "--json" in sys.argv:
        from gpunodes.views import document

        terminal.echo(document.error(error))
    return error.exit_code


def _unexpected(error: Exception) -> GpunodesError:
    """What nobody foresaw, in a sentence; its traceback, for those who mend it, is in a file."""
    import traceback

    from gpunodes.errors import GpunodesError, sentence
    from gpunodes.settings import state_home

    try:
        path = state_home() / "traceback.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8", errors="replace")
    except OSError:
        return GpunodesError(sentence(error), "", "this is a fault of gpunodes")
    return GpunodesError(sentence(error), "", f"this is a fault of gpunodes; please report it with {path}")


def main() -> None:
    """The entry point: the only place that turns errors into exit codes."""
    from gpunodes.errors import ExitCode, GpunodesError, WrongInput

    try:
        code = root.main(standalone_mode=False)
    except click.exceptions.Abort:
        terminal.echo("gpunodes: interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else "gpunodes"
        sys.exit(_fail(WrongInput(error.format_message().rstrip("."), "", f"see `{path} --help`")))
    except GpunodesError as error:
        sys.exit(_fail(error))
    except BrokenPipeError:
        # The reader of a pipe (`gpunodes status | head`) went away: nothing is wrong with us.
        sys.stderr.close()
        sys.exit(ExitCode.DONE)
    except Exception as error:
        sys.exit(_fail(_unexpected(error)))
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)
