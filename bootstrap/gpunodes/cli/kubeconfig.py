"""gpunodes kubeconfig"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import checked, kubeconfig, kubectl, users
from gpunodes.views import document
from gpunodes.views import users as view_of


@click.command()
@click.option("--merge", is_flag=True, help="Add it to the file that kubectl reads, and make it the current context.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write; by default kubeconfig, or NAME.kubeconfig with --user NAME.",
)
@click.option(
    "--user", metavar="NAME", default="", help="Make or renew the kubeconfig of a person with limited rights."
)
@click.option(
    "--role", metavar="ROLE", default="", help="With --user: view, edit, admin, or another ClusterRole that exists."
)
@click.option("--namespace", metavar="NAME", default="", help="With --role: only in this namespace.")
@click.option(
    "--group", "groups", metavar="NAME", multiple=True, help="With --user: a group of the person; repeatable."
)
@click.option(
    "--days", type=options.Whole(1, users.MOST_DAYS), metavar="NUMBER", help="With --user: when it ends; by default 90."
)
@click.option("--users", "listed", is_flag=True, help="List the users that --user made; write nothing.")
@click.option("--remove-user", "removed", metavar="NAME", default="", help="Take all rights of a user away.")
@click.option("--yes", is_flag=True, help="Do not ask before a person gets an administrator's rights.")
@options.inventory_option
@options.json_option
def command(
    *,
    merge: bool,
    output: Path | None,
    user: str,
    role: str,
    namespace: str,
    groups: tuple[str, ...],
    days: int | None,
    listed: bool,
    removed: str,
    yes: bool,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Fetch the administrator's kubeconfig, or make one for a person.

    The administrator's gives full access to the cluster. A person's has a client certificate with an end, which the
    cluster signs; its key is made here. Run the same command again to renew it: without --role the person keeps the
    roles. Every file is written with mode 0600.
    """
    if sum(map(bool, (user, listed, removed))) > 1:
        raise WrongInput("several of --user, --users and --remove-user", "one of them", "leave the others out")
    if not user and (role or namespace or groups or days):
        raise WrongInput("--role, --namespace, --group or --days without --user", "a person", "add --user NAME")
    if (listed or removed) and (merge or output):
        raise WrongInput("--merge or --output with --users or --remove-user", "", "these write no file")
    if merge and output:
        raise WrongInput(
            f"both --merge and --output {output}",
            "one of them: --merge writes to the file that kubectl reads",
            "leave the other out; KUBECONFIG chooses the file of --merge",
        )
    request = users.Request(user, role, namespace, groups, days or users.DAYS)
    if user:
        users.check(request)
    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    if listed or removed:
        return _users(inventory, removed, as_json=as_json)
    path = output or Path(f"{user}.kubeconfig" if user else "kubeconfig")
    path = (kubeconfig.user_file() if merge else path).absolute()
    if user:
        made = users.make(inventory, request, terminal.progress, lambda what: _confirm(what, yes=yes))
        kubeconfig.write(path, made.document, merge=merge)
        _show(path, made.document["current-context"], made, as_json=as_json)
        return ExitCode.DONE
    fetched = kubeconfig.fetch(inventory, lambda each: terminal.progress(f"warning: {each}"))
    kubeconfig.write(path, fetched, merge=merge)
    if merge and (wrong := kubectl.problem(inventory)):
        terminal.progress(f"warning: {wrong}")
    _show(path, fetched["current-context"], as_json=as_json)
    return ExitCode.DONE


def _users(inventory: Inventory, removed: str, *, as_json: bool) -> int:
    gone, left = users.remove(inventory, removed) if removed else ([], [])
    if as_json:
        terminal.echo(view_of.dump([] if removed else users.users(inventory), gone, left))
    elif removed:
        terminal.line(
            f"no binding names {removed} any more; the certificate is valid until {view_of.date(gone[0].end)}: "
            "its groups keep their rights, and it gives rights again if the name is bound again"
        )
        if left:
            terminal.report(view_of.remains(removed, left))
    else:
        terminal.report(view_of.table(users.users(inventory), terminal.columns()))
    return ExitCode.DONE


def _show(path: Path, context: str, made: users.Made | None = None, *, as_json: bool) -> None:
    if as_json:
        found = {"schema": "gpunodes.kubeconfig/1", "path": str(path), "context": context}
        terminal.echo(document.dump(found | ({"users": view_of.rows_of(made.bindings)} if made else {})))
    elif made:
        terminal.line(f"{path}: context {context}, until {view_of.date(made.end)}")
        terminal.report(view_of.table(made.bindings, terminal.columns()))
    else:
        terminal.line(f"{path}: context {context}")


def _confirm(consequence: str, *, yes: bool) -> None:
    terminal.check_confirmable(consequence, yes=yes)
    terminal.confirm(consequence, yes=yes)
