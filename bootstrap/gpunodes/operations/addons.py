"""The add-ons of a cluster: network and device plugin, brought to the versions of this gpunodes, and optional ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.engine.fleet import Fleet
from gpunodes.errors import GpunodesError, Interrupted, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Event, TaskEnded
from gpunodes.operations.rolling import commands, context, upgrades
from gpunodes.operations.rolling.context import Report, RolloutCommand
from gpunodes.planner import reports
from gpunodes.planner.addons import Addon, Change, PlannedAddon, images_of, planned, refusal, version_of

_PLAYBOOK = "addon.yml"


def plan(inventory: Inventory) -> list[PlannedAddon]:
    """The installed add-ons with what would change; raises GpunodesError if the cluster cannot be read."""
    found: list[PlannedAddon] = []
    for result in _run(inventory, "pending", "the add-ons cannot be read"):
        if (answer := result.get("addons")) is None:
            continue
        if problem := reports.addons_problem(answer):
            raise _invalid(problem)
        found += map(planned, answer)
    return found


def upgrade(fleet: Fleet, inventory: Inventory, report: Report) -> None:
    """Bring the network add-on and the device plugin to the versions of this gpunodes, while no roll-out can begin.

    Raises WrongInput if a roll-out is unfinished, and GpunodesError with the nodes on which an add-on does not run:
    then it is as before. Raises Lost if another command may have begun a roll-out meanwhile.
    """
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(context.opened(fleet, "addon upgrade", report))
        commands.check_finished(stack.enter_context(commands.locked(opened)))
        _upgrade(inventory, opened)


def upgrade_inside(opened: RolloutCommand) -> None:
    """As ``upgrade``, as the last part of a roll-out whose lock the command holds."""
    _upgrade(upgrades.inventory_of(opened.fleet), opened)


def _upgrade(inventory: Inventory, opened: RolloutCommand) -> None:
    opened.report("", "updating the network add-on and the device plugin")
    _run(inventory, "addons", "the add-ons were not updated", opened.leases.lost)


def listed(inventory: Inventory) -> dict[str, str]:
    """The versions of the optional add-ons that are installed, by name; raises GpunodesError if they cannot be read."""
    results = _run(inventory, "optional", "the add-ons cannot be read", variables={"addon_state": "listed"})
    answers = [each["installed"] for each in results if "installed" in each]
    if problem := reports.installed_problem(answers[0] if answers else None):
        raise _invalid(problem)
    return dict(answers[0])


def up(
    fleet: Fleet, inventory: Inventory, addon: Addon, manifest: Path | None, report: Report, *, dry_run: bool = False
) -> Change:
    """Install an optional add-on, and wait until it runs.

    ``manifest`` is the file with its objects if it has no template. Raises WrongInput if the settings forbid it, or the
    file has something else, and GpunodesError if an object of another owner exists, or it does not run.
    """
    given = fleet.settings()
    if wrong := refusal(addon, given):
        raise wrong
    images_of(addon, given["gpunodes_addon_images"])
    objects = objects_of(addon, manifest)
    variables = {"addon_name": addon.name, "addon_objects": objects}
    if objects:
        variables["addon_version"] = version_of(addon, objects)
    return _change(fleet, inventory, "up", variables, report, dry_run=dry_run)


def down(fleet: Fleet, inventory: Inventory, addon: Addon, report: Report, *, dry_run: bool = False) -> Change:
    """Remove an optional add-on. Raises GpunodesError while it is in use."""
    variables = {"addon_name": addon.name, "addon_state": "absent"}
    return _change(fleet, inventory, "down", variables, report, dry_run=dry_run)


def verify(inventory: Inventory, addon: Addon) -> Change:
    """Wait until an optional add-on runs and answers; raises GpunodesError with the reason if it does not."""
    variables = {"addon_name": addon.name, "addon_state": "verified"}
    return _done(_run(inventory, "optional", f"{addon.name} does not run", variables=variables))


def objects_of(addon: Addon, manifest: Path | None) -> list[dict[str, Any]]:
    """The objects in the file of an add-on without a template, none for one with; raises WrongInput."""
    if not addon.manifest:
        if manifest:
            raise WrongInput(
                f"{addon.name} takes no --manifest", "an add-on without objects of its own", "leave it out"
            )
        return []
    if not manifest:
        raise WrongInput(
            f"gpunodes has no objects of {addon.name} {addon.version}",
            "--manifest FILE, a file of its publisher",
            addon.obtaining,
        )
    try:
        documents = list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WrongInput(f"{manifest} cannot be read: {error}", "a file of Kubernetes objects in YAML", "") from error
    found = [each for document in documents if document for each in _items(document)]
    if not found or not all(_is_object(each) for each in found):
        raise WrongInput(
            f"{manifest} has something else than objects", "Kubernetes objects in YAML", "download it again"
        )
    return found


def _items(document: Any) -> list[Any]:
    is_list = isinstance(document, dict) and document.get("kind") == "List"
    return list(document.get("items") or ()) if is_list else [document]


def _is_object(each: Any) -> bool:
    if not isinstance(each, dict) or not isinstance(each.get("metadata"), dict):
        return False
    return all(
        isinstance(value, str) for value in (each.get("apiVersion"), each.get("kind"), each["metadata"].get("name"))
    )


def _change(
    fleet: Fleet, inventory: Inventory, verb: str, variables: Mapping[str, Any], report: Report, *, dry_run: bool
) -> Change:
    """Run the playbook for an optional add-on, while no roll-out can begin."""
    name = variables["addon_name"]
    failed = f"{name} was not {'installed' if verb == 'up' else 'removed'}"
    with contextlib.ExitStack() as stack:
        lost: Callable[[], GpunodesError | None] = _held
        if not dry_run:
            opened = stack.enter_context(context.opened(fleet, f"addon {verb}", report))
            commands.check_finished(stack.enter_context(commands.locked(opened)))
            lost = opened.leases.lost
            report("", f"{'installing' if verb == 'up' else 'removing'} {name}")
        results = _run(inventory, "optional", failed, lost, variables, check=dry_run)
    return _done(results)


def _done(results: Sequence[Mapping[str, Any]]) -> Change:
    """What the module reports; raises GpunodesError for another form."""
    found: dict[str, list[str]] = {"objects": [], "idle": []}
    for key, names in found.items():
        for answer in (each[key] for each in results if key in each):
            if problem := reports.changes_problem(answer):
                raise _invalid(problem)
            names.extend(answer)
    return Change(**found)


def _invalid(problem: str) -> GpunodesError:
    return GpunodesError(
        f"the control plane's report of the add-ons is invalid: {problem}",
        "a report of the module addon",
        "check that the machine and its API server are yours",
    )


def _held() -> GpunodesError | None:
    return None


def _run(
    inventory: Inventory,
    tag: str,
    failed: str,
    lost: Callable[[], GpunodesError | None] = _held,
    variables: Mapping[str, Any] | None = None,
    *,
    check: bool = False,
) -> list[Mapping[str, Any]]:
    """Run the playbook with a tag; the results of its tasks on the control plane. Raises GpunodesError if it fails.

    ``lost`` returns why the lock is lost, None while it is held: it is asked all the time.
    """
    control = control_planes.choose(inventory).machine
    answers: list[Mapping[str, Any]] = []
    failures: list[TaskEnded] = []

    def on_event(event: Event) -> None:
        if isinstance(event, TaskEnded):
            if event.outcome.is_failure:
                failures.append(event)
            elif event.machine == control.name:
                answers.append(event.result)

    play = runner.Play(
        _PLAYBOOK, inventory, [control.name], tags=[tag], control=control.name, variables=variables, check=check
    )
    ended = runner.run(play, journal.open_run(f"addon {tag}"), on_event, lambda: lost() is not None)
    if ended.interrupted:
        raise lost() or Interrupted
    if not ended.ok:
        raise GpunodesError(
            f"{failed}: {events.cause(failures[0]) if failures else ended.error_text}",
            "add-ons of this gpunodes",
            f"run the same command again; the log is {ended.log}",
        )
    return answers
