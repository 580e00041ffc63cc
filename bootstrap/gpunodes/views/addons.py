"""The add-ons of a cluster, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from gpunodes.model import printable
from gpunodes.planner.addons import Addon, Change, PlannedAddon
from gpunodes.views import document
from gpunodes.views.text import table, wrapped

_SHOWN = 5


def plan(found: Sequence[PlannedAddon], columns: int | None = None) -> str:
    """Every add-on with its running and its wanted images, for a screen of ``columns``, if any."""
    lines = [part for one in found for line, indent in _addon(one) for part in wrapped(line, columns, indent)]
    return "\n".join(lines) or "no add-on of gpunodes is installed"


def plan_document(found: Sequence[PlannedAddon]) -> str:
    """``gpunodes.addon-plan/1``"""
    addons = [{**dataclasses.asdict(one), "needed": one.needed} for one in found]
    return document.dump({"schema": "gpunodes.addon-plan/1", "exit_code": 0, "addons": addons})


def listing(known: Mapping[str, Addon], installed: Mapping[str, str], columns: int | None = None) -> str:
    """The optional add-ons as a table, with the installed versions."""
    rows = [("NAME", "VERSION", "INSTALLED", "TRIED", "PURPOSE")]
    rows += [(one.name, one.version, installed.get(one.name, "-"), one.run, one.purpose) for one in known.values()]
    rows += [(name, "-", version, "-", "unknown to this gpunodes") for name, version in _unknown(known, installed)]
    return table(rows, columns)


def list_document(known: Mapping[str, Addon], installed: Mapping[str, str]) -> str:
    """``gpunodes.addon-list/1``"""
    addons: list[dict[str, object]] = [
        {
            "name": one.name,
            "purpose": one.purpose,
            "version": one.version,
            "installed": installed.get(one.name, ""),
            "images": sorted(one.images.values()),
            "manifest": one.manifest,
            "run": one.run,
        }
        for one in known.values()
    ]
    unknown = {"purpose": "", "version": "", "images": [], "manifest": "", "run": ""}
    addons += [{"name": name, "installed": version, **unknown} for name, version in _unknown(known, installed)]
    return document.dump({"schema": "gpunodes.addon-list/1", "exit_code": 0, "addons": addons})


def change_document(one: Addon, done: Change, *, dry_run: bool) -> str:
    """``gpunodes.addon/1``"""
    return document.dump(
        {
            "schema": "gpunodes.addon/1",
            "exit_code": 0,
            "name": one.name,
            "version": one.version,
            "dry_run": dry_run,
            "changes": list(done.objects),
            "idle": list(done.idle),
        }
    )


def change(one: Addon, done: Change, result: str, *, dry_run: bool) -> str:
    """What was done to an optional add-on, with its ``result``, or with ``dry_run`` would be."""
    count = len(done.objects)
    first = f"{count} objects would change" if dry_run else f"{result}; {count} objects changed"
    return "\n".join(map(printable, (f"{one.name}: {first}", *(f"  {title}" for title in done.objects))))


def running(done: Change) -> str:
    """That an add-on runs, and what of it no node runs: dcgm-exporter in a cluster without GPUs."""
    return f"no node is there for its DaemonSet {', '.join(done.idle)}" if done.idle else "it runs"


def _unknown(known: Mapping[str, Addon], installed: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((name, version) for name, version in installed.items() if name not in known)


def _addon(one: PlannedAddon) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    yield f"{one.name}: {'update' if one.needed else 'up to date, nothing to do'}", 2
    for image, nodes in sorted(one.running.items()):
        yield f"  runs      {image} on {nodes} node{'' if nodes == 1 else 's'}", 12
    for image in one.wanted:
        if image not in one.running:
            yield f"  wanted    {image}", 12
    if one.changes:
        yield f"  changes   {', '.join(one.changes)}", 12
    if one.behind:
        more = f" and {len(one.behind) - _SHOWN} others" if len(one.behind) > _SHOWN else ""
        yield f"  behind    {', '.join(one.behind[:_SHOWN])}{more}", 12
