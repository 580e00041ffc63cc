"""The registry of a cluster, for people and as JSON documents."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gpunodes.ansible.module_utils.certificates import SOON_DAYS
from gpunodes.model import RunResult, printable
from gpunodes.planner import certificates
from gpunodes.views import document, text


class Started(Protocol):
    """The registry after `registry up`."""

    @property
    def address(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def share(self) -> str: ...
    @property
    def folder(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def certificate_end(self) -> float: ...
    @property
    def changed(self) -> Sequence[str]: ...
    @property
    def password(self) -> str: ...
    @property
    def logins(self) -> Renewed: ...


class Renewed(Protocol):
    """The namespaces whose login got the present password, and those whose login has another one."""

    @property
    def namespaces(self) -> Sequence[str]: ...
    @property
    def left(self) -> Sequence[str]: ...


class Login(Protocol):
    """A login in one namespace."""

    @property
    def namespace(self) -> str: ...


class Status(Protocol):
    """What the cluster reports of its registry."""

    @property
    def address(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def folder(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def certificate_end(self) -> float: ...
    @property
    def logins(self) -> Sequence[Login]: ...


class Pulled(Protocol):
    """Whether a node pulled and ran an image."""

    @property
    def node(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def problem(self) -> str: ...


def password(found: Started) -> str:
    """The new login, which is shown once."""
    lines = [f"user: {found.user}", f"password: {found.password}"]
    return "\n".join([*lines, "The password is not shown again; it is in the Secret registry of gpunodes-registry."])


def started(found: Started, *, dry_run: bool) -> str:
    """What was made, and how it is used."""
    verb = "would change" if dry_run else "changed"
    lines = [f"{verb} {', '.join(found.changed)}" if found.changed else "nothing in the cluster was changed"]
    lines += _logins(found, dry_run=dry_run)
    if not dry_run:
        lines += [
            f"the registry is {found.address}; its images are in {found.folder}",
            f"let pods of a namespace pull: gpunodes registry login {found.address} --namespace NAME",
            "push from this computer: gpunodes registry open",
        ]
    return "\n".join(map(printable, lines))


def _logins(found: Started, *, dry_run: bool) -> list[str]:
    """Which namespaces pull with the present password now, and which do not."""
    lines = []
    if found.logins.namespaces:
        verb = "would get" if dry_run else "got"
        lines.append(f"the logins of these namespaces {verb} the new password: {', '.join(found.logins.namespaces)}")
    if found.logins.left:
        lines += [
            f"these logins have another password, and no record of `registry login`: {', '.join(found.logins.left)}",
            f"if their pods may pull: gpunodes registry login {found.address} --namespace NAME",
        ]
    return lines


def status(found: Status) -> str:
    """A line for each fact."""
    soon = certificates.days_left(found.certificate_end, time.time()) < SOON_DAYS
    rows = [
        ("address", found.address),
        ("state", found.problem or "ready"),
        ("may push", f"the user {found.user}"),
        ("may pull", ", ".join(_namespaces(found)) or "no namespace; see `gpunodes registry login`"),
        ("images", found.folder or "unknown"),
        ("certificate", f"ends {_day(found.certificate_end)}{'; run `gpunodes registry up` again' if soon else ''}"),
        ("runs", found.image or "unknown"),
    ]
    return "\n".join(printable(f"{name:<12} {value}") for name, value in rows)


def pulled(found: Sequence[Pulled]) -> str:
    """A line for each node."""
    return text.table([("NODE", "PULLED"), *((each.node, each.problem or "ran the image that was pushed")
                                             for each in found)], None)  # fmt: skip


def removed(objects: Sequence[str], folder: str) -> str:
    """What was removed, and where the images are."""
    if not objects:
        return "the cluster has no registry"
    return printable(f"removed {', '.join(objects)}" + (f"; the images stay in {folder}" if folder else ""))


def dump_started(found: Started, ended: RunResult | None) -> str:
    """``gpunodes.registry/1`` of `registry up`; ``run`` is null if it failed before or after the nodes' playbook."""
    own = {name: getattr(found, name) for name in ("address", "user", "password", "share", "folder", "image")}
    end = {"certificate_end": round(found.certificate_end)}
    logins = {"logins": list(found.logins.namespaces), "left": list(found.logins.left)}
    return _document(**own, **end, **logins, changed=list(found.changed), run=_run(ended))


def dump_status(found: Status) -> str:
    """``gpunodes.registry/1`` of `registry status`"""
    own = {name: getattr(found, name) for name in ("address", "user", "folder", "image", "problem")}
    end = {"certificate_end": round(found.certificate_end), "ready": not found.problem}
    return _document(**own, **end, namespaces=_namespaces(found))


def dump_pulled(found: Sequence[Pulled]) -> str:
    """``gpunodes.registry/1`` of `registry verify`"""
    rows = [{"node": each.node, "digest": each.digest, "problem": each.problem} for each in found]
    return _document(nodes=rows)


def dump_removed(objects: Sequence[str], folder: str, ended: RunResult | None) -> str:
    """``gpunodes.registry/1`` of `registry down`"""
    return _document(removed=list(objects), folder=folder, run=_run(ended))


def _run(ended: RunResult | None) -> Any:
    return json.loads(document.run(ended)) if ended else None


def _namespaces(found: Status) -> list[str]:
    return sorted({each.namespace for each in found.logins})


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def _document(**content: Any) -> str:
    return document.dump({"schema": "gpunodes.registry/1", **content})
