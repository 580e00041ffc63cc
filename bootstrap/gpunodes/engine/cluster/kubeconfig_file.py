"""A kubeconfig file of the user: whether it may be used, and the one context of it that is.

The file is the user's own, as for kubectl: a program that it names to get a token (an exec plugin) is run. So nobody
else may be able to change it. What gpunodes takes from a control plane (``gpunodes.kubeconfig``) never has a program.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunodes.engine.cluster import exec_plugin
from gpunodes.errors import WrongInput
from gpunodes.kubeconfig import parse_yaml

_MAX_BYTES = 4 << 20
_CLUSTER = {
    "server",
    "certificate-authority",
    "certificate-authority-data",
    "tls-server-name",
    "proxy-url",
    "disable-compression",
    "insecure-skip-tls-verify",
    "extensions",
}
_USER = {
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
    "token",
    "tokenFile",
    "exec",
    "extensions",
}
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_DATA = ("certificate-authority", "client-certificate", "client-key")
_SERVER = re.compile(r"https://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~/-]*)?")


@dataclass(slots=True)
class Selected:
    """One context of a kubeconfig, as a document with nothing else; ``close`` ends the files that it names."""

    document: dict[str, Any] = field(repr=False)
    context: str
    server: str
    descriptors: Sequence[int] = ()
    """Its files in memory."""
    folder: Path | None = None
    """Its files on a disk, on systems without files in memory: they are ended as soon as they are read."""

    def close(self) -> None:
        """End the files."""
        for each in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(each)
        self.descriptors = ()
        if self.folder:
            # Often on the way out with another error, which this must not hide; the folder is its user's alone (0700).
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


def selected(path: Path, context: str = "", *, asks: bool = True) -> Selected:
    """The context of a kubeconfig file, by default its current one, with what its exec plugin gives.

    ``asks``: the plugin may use the terminal. Raises WrongInput, and exec_plugin.Failed.
    """
    document = _read(path)
    name = context or document.get("current-context")
    if not isinstance(name, str) or not name:
        raise WrongInput(f"{path} has no current context", "a context", "name one with --context")
    found = _named(path, document, "context", name)
    cluster = _part(path, document, "cluster", found.get("cluster"), _CLUSTER)
    user = _part(path, document, "user", found.get("user"), _USER)
    server = _checked_server(path, cluster)
    if not _has_credentials(user):
        raise WrongInput(
            f"the user of the context {name!r} in {path} has no credentials",
            "a client certificate with its key, a token, a tokenFile or an exec plugin",
            "name another context with --context",
        )
    base, plugin = path.absolute().parent, user.pop("exec", None)
    cluster, user = _absolute(cluster, base), _absolute(user, base)
    if plugin is not None:
        plugin = _plugin(path, plugin, base)
        # It is run only if the file has no credentials beside it.
        user |= {} if _has_credentials(user) else exec_plugin.credentials(plugin, cluster, asks=asks)
    kept = [_decoded(path, each) for each in (cluster, user)]
    one = {"apiVersion": "v1", "kind": "Config", "current-context": "one"}
    return _with_files(Selected(one, name, server), *kept)


def _read(path: Path) -> dict[str, Any]:
    """The file, opened once, so that what was checked is what is read."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            _check_private(path, about)
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise WrongInput(
            f"the kubeconfig {path} cannot be read: {error.strerror}", "a kubeconfig file", "correct its path"
        ) from error
    try:
        document = parse_yaml(text) if len(text) <= _MAX_BYTES else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise WrongInput(f"{path} is not a kubeconfig", "YAML with clusters, users and contexts", "correct its path")
    return document


def _check_private(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise WrongInput(f"{path} is not a file", "a kubeconfig file", "correct its path")
    if about.st_uid not in {os.geteuid(), 0}:
        raise WrongInput(
            f"the kubeconfig {path} belongs to another user",
            "a file of the user who runs gpunodes: it may name programs, which are run",
            f"copy it, once you know what is in it: install -m 600 {path} ~/.kube/",
        )
    if mode := stat.S_IMODE(about.st_mode) & 0o077:
        able = "change" if mode & 0o022 else "read"
        raise WrongInput(f"other users can {able} the kubeconfig {path}", "mode 0600", f"chmod 600 {path}")


def _named(path: Path, document: Mapping[str, Any], kind: str, name: Any) -> dict[str, Any]:
    """The entry of this name among the contexts, clusters or users."""
    entries = document.get(f"{kind}s")
    listed = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    found = [each.get(kind) for each in listed if each.get("name") == name]
    if len(found) != 1 or not isinstance(found[0], dict):
        known = ", ".join(sorted(str(each.get("name")) for each in listed)) or "none"
        raise WrongInput(
            f"{path} has {'no' if not found else 'no valid' if len(found) == 1 else len(found)} {kind} {name!r}",
            f"one of its {kind}s: {known}",
            "correct --context (or gpunodes_api_context)" if kind == "context" else "correct the file",
        )
    return dict(found[0])


def _part(path: Path, document: Mapping[str, Any], kind: str, name: Any, known: set[str]) -> dict[str, Any]:
    """A cluster or user, with fields that are supported; one that is ignored may mean other rights, or another API."""
    part = _named(path, document, kind, name)
    if unknown := sorted(str(each) for each in part.keys() - known):
        hint = "use an exec plugin instead" if "auth-provider" in unknown else "make one without, for gpunodes"
        raise WrongInput(f"{path} has {', '.join(unknown)} in its {kind} {name!r}", "fields that are supported", hint)
    for key, value in part.items():
        if key not in {"exec", "extensions", "disable-compression", "insecure-skip-tls-verify"} and (
            not isinstance(value, str) or "\x00" in value
        ):
            raise WrongInput(f"{key} of the {kind} {name!r} in {path} is not a text", "a text", "correct the file")
    return part


def _checked_server(path: Path, cluster: Mapping[str, Any]) -> str:
    server = str(cluster.get("server") or "").rstrip("/")
    if cluster.get("insecure-skip-tls-verify"):
        raise WrongInput(
            f"{path} has insecure-skip-tls-verify: anybody in between could answer as the cluster",
            "the CA of the cluster in certificate-authority-data",
            "add it, and remove insecure-skip-tls-verify",
        )
    if not _SERVER.fullmatch(server):
        raise WrongInput(f"{path} names the server {server!r}", "an address with https://", "correct it there")
    return server


def _has_credentials(user: Mapping[str, Any]) -> bool:
    pair = all(user.get(each) or user.get(f"{each}-data") for each in ("client-certificate", "client-key"))
    return bool(pair or user.get("token") or user.get("tokenFile") or user.get("exec"))


def _absolute(part: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Relative paths are relative to the kubeconfig's folder, as for kubectl."""
    return {key: str(base / value) if key in _FILES and value else value for key, value in part.items()}


def _plugin(path: Path, plugin: Any, base: Path) -> dict[str, Any]:
    command = plugin.get("command") if isinstance(plugin, dict) else None
    if not isinstance(command, str) or not command:
        raise WrongInput(f"an exec plugin in {path} has no command", "the name of a program", "correct the file")
    is_relative_path = "/" in command and not command.startswith("/")
    return {**plugin, "command": str(base / command) if is_relative_path else command}


def _decoded(path: Path, part: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A cluster or user without the certificates and keys in it, and these."""
    result, found = dict(part), dict[str, bytes]()
    for key in _DATA:
        if not (text := result.pop(f"{key}-data", None)):
            continue
        try:
            found[key] = base64.b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError):
            raise WrongInput(f"{key}-data in {path} is not in base64", "a certificate or key", "correct it") from None
    return result, found


def _with_files(made: Selected, *parts: tuple[dict[str, Any], Mapping[str, bytes]]) -> Selected:
    """The same with its cluster and user: the TLS library reads certificates and keys from files.

    They are in memory, or, where the system has no such files (macOS), private for as long as ``folder`` says.
    """
    with contextlib.ExitStack() as undone:
        undone.callback(made.close)
        _write_files(made, parts)
        undone.pop_all()
    made.document["contexts"] = [{"name": "one", "context": {"cluster": "one", "user": "one"}}]
    return made


def _write_files(made: Selected, parts: Sequence[tuple[dict[str, Any], Mapping[str, bytes]]]) -> None:
    descriptors = made.descriptors = list[int]()
    if not hasattr(os, "memfd_create"):
        made.folder = Path(tempfile.mkdtemp(prefix="gpunodes-"))
    for kind, (part, contents) in zip(("cluster", "user"), parts, strict=True):
        for key, content in contents.items():
            if made.folder:
                file = made.folder / f"{kind}-{key}"
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            else:
                descriptor = os.memfd_create("gpunodes-kubeconfig")
                file = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
                descriptors.append(descriptor)
            part[key] = str(file)
            os.write(descriptor, content)
            if made.folder:
                os.close(descriptor)
        made.document[f"{kind}s"] = [{"name": "one", kind: part}]
