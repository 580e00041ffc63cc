"""Notebooks, for people and as JSON documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from gpunodes.planner.notebooks import Place, Request
from gpunodes.views import document, text


class Started(Protocol):
    """A notebook that is there, and what the command made of it."""

    @property
    def place(self) -> Place: ...
    @property
    def request(self) -> Request: ...
    @property
    def made(self) -> Sequence[str]: ...
    @property
    def token(self) -> str: ...
    @property
    def node_port(self) -> int | None: ...


class Listed(Protocol):
    """A notebook in a list."""

    @property
    def place(self) -> Place: ...
    @property
    def request(self) -> Request | None: ...
    @property
    def is_ready(self) -> bool: ...


class Seen(Protocol):
    """What a cell sees."""

    @property
    def gpus(self) -> Sequence[str]: ...
    @property
    def cuda(self) -> int: ...


def made(found: Started, *, dry_run: bool) -> str:
    """What was made, and the token if it is new."""
    verb = "would make" if dry_run else "made"
    lines = [f"{verb} {', '.join(found.made)} {found.place.objects} in the namespace {found.place.namespace}"]
    if not found.made:
        lines = [f"the notebook {found.place} exists; nothing was changed"]
    if found.token:
        lines += [f"token: {found.token}", "It is not shown again; `gpunodes jupyter open` logs in by itself."]
    return "\n".join(lines)


def ready(found: Started) -> str:
    """How it is reached."""
    lines = [f"ready: {found.place.command('open')}"]
    if found.node_port:
        lines.append(f"or, without encryption, http://NODE:{found.node_port}/lab with the address of any node")
    return "\n".join(lines)


def table(found: Sequence[Listed], columns: int | None) -> str:
    """A row for each notebook."""
    rows = [("NAMESPACE", "NAME", "STATE", "GPUS", "HOME", "POOL", "NODE PORT", "IMAGE")]
    for each in found:
        state, given = "ready" if each.is_ready else "not ready", each.request
        own = ("?",) * 5
        if given:
            port = "yes" if given.node_port else "no"
            own = (str(given.gpus), given.storage or "scratch", given.pool or "any", port, given.image)
        rows.append((each.place.namespace, each.place.name, state, *own))
    return text.table(rows, columns) if found else "no notebooks"


def seen(found: Seen) -> str:
    """The GPUs that a cell sees."""
    return "\n".join([f"a cell ran; CUDA counts {found.cuda} GPUs", *found.gpus])


def dump(found: Started, *, dry_run: bool, ready: bool) -> str:
    """``gpunodes.notebook/1`` of `jupyter up`"""
    more = {"made": list(found.made), "dry_run": dry_run, "ready": ready}
    return _document(found.place, found.request, **more, token=found.token, node_port=found.node_port)


def dump_removed(place: Place, removed: Sequence[str], request: Request | None) -> str:
    """``gpunodes.notebook/1`` of `jupyter down`"""
    return _document(place, request, removed=list(removed))


def dump_seen(place: Place, found: Seen, request: Request) -> str:
    """``gpunodes.notebook/1`` of `jupyter verify`"""
    return _document(place, request, seen={"gpus": list(found.gpus), "cuda": found.cuda})


def dump_list(found: Sequence[Listed]) -> str:
    """``gpunodes.notebooks/1``"""
    rows = [
        {**asdict(each.place), "ready": each.is_ready, "request": asdict(each.request) if each.request else None}
        for each in found
    ]
    return document.dump({"schema": "gpunodes.notebooks/1", "notebooks": rows})


def _document(place: Place, request: Request | None, **more: Any) -> str:
    own = {"schema": "gpunodes.notebook/1", **asdict(place), "request": asdict(request) if request else None}
    return document.dump({**own, **more})
