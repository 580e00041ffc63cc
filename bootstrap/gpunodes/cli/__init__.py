"""The command line. One command a file, loaded only when it is called, so that ``gpunodes --help`` stays fast."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpunodes import __version__
from gpunodes.cli import terminal

if TYPE_CHECKING:
    from gpunodes.errors import GpunodesError

# Section -> name -> one line of help. Each command is the object `command` of the module of its name; a test compares
# these lines with the commands' own help.
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Cluster": {
        "init-master": "Make a machine the control plane of a new cluster.",
        "init-control-plane": "Another name of init-master.",
        "preflight": "Check what would stop a join; nothing is changed.",
        "ports": "List the ports that must be open between the machines.",
        "join": "Join machines to the cluster, as workers or as control planes.",
        "prepare": "Install what a join would install, without joining: for golden images.",
        "up": "Set up the whole inventory: control planes and workers, prepared in parallel.",
        "adopt": "Compare a cluster that kubeadm made with one of gpunodes, and write its inventory.",
        "status": "Show the nodes of the cluster and their states.",
        "kubeconfig": "Fetch the administrator's kubeconfig, or make one for a person.",
        "registry": "Run a registry in the cluster; log pods in at private image registries.",
        "report": "Write one page about the whole cluster: machines, versions, conflicts, health, repairs.",
        "dashboard": "Open the dashboard of the cluster in a browser, over SSH.",
        "etcd": "Back up and restore the cluster's state.",
        "certs": "Show when the certificates of the nodes end, and renew them.",
        "endpoint": "Move the address at which all machines reach the API.",
        "upgrade": "Upgrade Kubernetes, minor by minor and node by node.",
        "remove": "Drain a node, delete it from the cluster and reset its machine.",
        "reset": "Undo everything that gpunodes changed on machines.",
        "os": "Upgrade the operating systems of nodes, and show what is pending.",
        "addon": "Install, verify and remove optional add-ons; update the network add-on and the device plugin.",
        "storage": "Share folders among pods on all nodes, by NFS.",
        "runtime": "Upgrade container runtimes and container toolkits, and show what is pending.",
    },
    "GPUs": {
        "gpu": "Plan, install, verify and remove GPU software, and burn in GPUs.",
        "jupyter": "Run notebooks with GPUs in the cluster, and open them over SSH.",
        "gates": "List the kubelet's feature gates that matter for GPUs.",
    },
    "Health and repair": {
        "health": "Check GPU machines: state, action and evidence.",
        "serve-metrics": "Scan GPU machines again and again, and serve the verdicts to Prometheus.",
        "repair": "Repair machines: drain, reset or reboot, verify, uncordon.",
        "maintenance": "Keep repairs and new pods away from machines that people work on.",
        "rollout": "Apply settings, and follow, continue or abandon the work that is rolled out node by node.",
        "uncordon": 'Clear "needs repair" of a machine: pods and repairs are allowed on it again.',
        "autoscale": "Scale pools by switching machines on and off.",
        "power": "Show a machine's power state, switch it through its BMC, or change the BMC's password.",
        "history": "Show the recorded verdicts, repairs and burn-ins of one machine, or of all.",
    },
    "Tools": {
        "provision": "Get bare machines ready for gpunodes.",
        "playbook": "Run a playbook of gpunodes with ansible-playbook.",
        "content": "Print the folder of the Ansible collection that gpunodes runs.",
        "lab": "Virtual machines to try gpunodes on.",
        "help": "Show the help of a command, or a page of the documentation.",
        "completion": "Print a script that completes commands, machines and files in a shell.",
        "version": "Show the versions of gpunodes and of the software that it runs on.",
    },
}
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}
# Another name of a command -> the name of its module.
MODULES = {"init-control-plane": "init-master"}
# A command whose module cannot have its name: this one would hide the standard library's.
_RENAMED = {"os": "operating-system"}


class HelpfulGroup(click.Group):
    """A group that shows its help without a command, and the nearest command for an unknown one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"invoke_without_command": True, "no_args_is_help": False, **keywords})

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
        except click.UsageError as error:
            # Click's parser does not say whose options are wrong.
            name = ctx.invoked_subcommand or ""
            if error.ctx is None and (command := self.get_command(ctx, name)):
                error.ctx = click.Context(command, info_name=name, parent=ctx)
            raise
        if ctx.invoked_subcommand is None:
            terminal.echo(ctx.get_help())
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            raise no_command(ctx.command_path, name, self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class LazyGroup(HelpfulGroup):
    """A group that imports a command's module, of the package ``where``, only when that command is called.

    ``listing`` has the commands by section; ``modules`` maps commands to modules of another name.
    """

    def __init__(
        self,
        *arguments: Any,
        listing: Mapping[str, Mapping[str, str]],
        where: str,
        modules: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._sections = listing
        self._listing = [name for section in listing.values() for name in section]
        self._where = where
        self._modules = modules or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._listing)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        if cmd_name not in self._listing:
            return None
        module_name = self._modules.get(cmd_name, cmd_name).replace("-", "_")
        module = importlib.import_module(f"{self._where}.{module_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        for title, commands in self._sections.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


class StartingGroup(LazyGroup):
    """A group whose command ``start`` may be left out: ``upgrade 1.37`` is ``upgrade start 1.37``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self._listing, "-h", "--help"} and not ctx.resilient_parsing:
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=LazyGroup,
    listing=SECTIONS,
    where="gpunodes.cli",
    modules={**MODULES, **_RENAMED},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="gpunodes")
def root() -> None:
    """Turn bare SSH machines into a GPU Kubernetes cluster, and keep it healthy.

    Machines come from an Ansible inventory (inventory/hosts.yml, or -i).

    Exit codes: 0 success; 1 failed; 2 wrong input, nothing was changed; 3 done on some machines only, or a machine is
    not healthy; 130 interrupted.
    """


def no_command(path: str, name: str, known: Sequence[str]) -> GpunodesError:
    """The error for a command that does not exist, with the nearest ones that do."""
    import difflib

    from gpunodes.errors import WrongInput

    # The same letters in another order are a match however short the name is.
    near = [each for each in known if sorted(each) == sorted(name)]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.65)
    guess = f"did you mean {' or '.join(f'`{path} {each}`' for each in near)}? " if near else ""
    return WrongInput(f"{path} has no command {name!r}", "", f"{guess}`{path} --help` lists the commands")


def _fail(error: GpunodesError) -> int:
    """Print an error, as a document too where one is requested; returns its exit code."""
    terminal.error(error)
    _document(error)
    return error.exit_code


def _interrupted() -> int:
    """Print that the user stopped the command, as a document too where one is requested; returns the exit code."""
    from gpunodes.errors import ExitCode, Interrupted

    # The terminal has echoed ^C.
    terminal.echo(f"\n{terminal.INTERRUPTED}" if sys.stderr.isatty() else terminal.INTERRUPTED, err=True)
    _document(Interrupted())
    return ExitCode.INTERRUPTED


def _document(error: GpunodesError) -> None:
    """Print an error as a document, where the arguments request one: they may be wrong, and are not parsed then."""
    found = _format(sys.argv[1:])
    if found and not terminal.has_final():
        from gpunodes.views import document

        text = document.error(error)
        terminal.echo(document.as_yaml(text) if found == "yaml" else text)


def _format(argv: Sequence[str]) -> str:
    """``json``, ``yaml`` or nothing."""
    if "--json" in argv:
        return "json"
    # The --output of `kubeconfig` and `report` is a file, that of `provision seed` a folder.
    words = [] if {"kubeconfig", "provision", "report"} & set(argv) else argv
    given = [
        word.removeprefix("--output=").removeprefix("-o") for word in words if word.startswith(("--output=", "-o"))
    ]
    given += [after for word, after in itertools.pairwise(words) if word in {"-o", "--output"}]
    return next((word for word in given if word in {"json", "yaml"}), "")


def _unexpected(error: Exception) -> GpunodesError:
    """An error that no code expected, in a sentence; its traceback is in a file, for a bug report."""
    import traceback

    from gpunodes.errors import GpunodesError, sentence
    from gpunodes.settings import state_home

    try:
        path = state_home() / "traceback.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8", errors="replace")
    except (OSError, GpunodesError):
        return GpunodesError(sentence(error), "", "this is a bug in gpunodes")
    return GpunodesError(sentence(error), "", f"this is a bug in gpunodes; please report it with {path}")


# Errors of the controller's operating system -> remedy.
_REMEDIES = {
    errno.ENOSPC: "free some space there, then run the same command again",
    errno.EDQUOT: "free some space there, then run the same command again",
    errno.EACCES: "give this user access to it, then run the same command again",
    errno.EPERM: "give this user access to it, then run the same command again",
    errno.EROFS: "name a folder that can be written, then run the same command again",
    errno.EMFILE: "raise the limit of open files (`ulimit -n 4096`), then run the same command again",
}


def _refused(error: OSError) -> GpunodesError:
    """An error of the controller's own files, or an unexpected one."""
    from gpunodes.errors import GpunodesError, sentence

    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None:
        return _unexpected(error)
    return GpunodesError(sentence(error) if error.filename else f"cannot write: {error.strerror}", "", remedy)


def _drop_output() -> None:
    """Discard further output: the interpreter flushes its buffers when it ends, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def main() -> None:
    """The entry point: the only place that turns errors into exit codes."""
    from gpunodes.errors import ExitCode

    # As Ctrl-C: a command removes what it must not leave, such as the keys in half a backup.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _run()
    except terminal.OutputClosed:
        _drop_output()
        code = ExitCode.DONE
    except OSError:
        # Not even the error could be printed.
        _drop_output()
        code = ExitCode.FAILED
    sys.exit(code)


def _run() -> int:
    """Run the command that the arguments name; returns its exit code."""
    from gpunodes.errors import ExitCode, GpunodesError, Interrupted, WrongInput

    try:
        code = root.main(prog_name="gpunodes", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt, Interrupted):
        return _interrupted()
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else "gpunodes"
        message = " ".join(error.format_message().rstrip(".").split())
        return _fail(WrongInput(message[:1].lower() + message[1:], "", f"see `{path} --help`"))
    except GpunodesError as error:
        return _fail(error)
    except terminal.OutputClosed:
        raise
    except OSError as error:
        code = _fail(_refused(error))
        if error.errno == errno.ENOSPC and not error.filename:
            # Standard output is on the full disk.
            _drop_output()
        return code
    except Exception as error:
        return _fail(_unexpected(error))
    return code if isinstance(code, int) else ExitCode.DONE
