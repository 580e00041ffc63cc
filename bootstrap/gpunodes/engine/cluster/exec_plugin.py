"""The program of a kubeconfig that gives credentials (an exec plugin), run as kubectl runs it, but with a time limit.

Source: kubernetes.io, "Authenticating", client-go credential plugins. What it prints stays in memory.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.engine.power import program
from gpunodes.model import printable

_LIMIT_S = 60.0
_LOGIN_S = 300.0
"""The same where the user may type, or log in with a browser."""
_AGAIN_S = 20.0
"""The same when credentials have ended: a lock that is not renewed is lost after 50 s."""
_MOST_BYTES = 1 << 20
_LONGEST = 300
_OF_CLUSTER = ("server", "tls-server-name", "certificate-authority-data", "proxy-url", "disable-compression")
_EXTENSION = "client.authentication.k8s.io/exec"


class Failed(Exception):  # noqa: N818 - reads as the sentence it makes
    """The program gave no credentials; the text says why."""


def credentials(plugin: Mapping[str, Any], cluster: Mapping[str, Any], *, asks: bool) -> dict[str, str]:
    """The fields of a kubeconfig's user that the program gives: a token, or a certificate with its key.

    ``asks``: it may use the terminal, if there is one; else credentials have ended while a command runs. Raises Failed.
    """
    version, mode = plugin.get("apiVersion"), plugin.get("interactiveMode")
    has_terminal = asks and mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if mode == "Always" and not has_terminal:
        raise Failed("its exec plugin needs a terminal")
    spec: dict[str, Any] = {"interactive": has_terminal}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = _about(cluster)
    request = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    output = _run(
        [str(plugin["command"]), *_arguments(plugin)],
        {**_variables(plugin), "KUBERNETES_EXEC_INFO": json.dumps(request)},
        has_terminal=has_terminal,
        limit_s=_LOGIN_S if has_terminal else _LIMIT_S if asks else _AGAIN_S,
    )
    return _parsed(output, version)


def _run(argv: Sequence[str], variables: Mapping[str, str], *, has_terminal: bool, limit_s: float) -> str:
    """What it prints. Its messages go to the terminal if it has one; their last line is in the error otherwise."""
    try:
        if not has_terminal:
            done = program.run(argv, limit_s, variables)
            code, out, message = done.code, done.out, done.err.strip().rpartition("\n")[2]
        else:
            ended = subprocess.run(
                argv, env={**os.environ, **variables}, stdout=subprocess.PIPE, timeout=limit_s, check=False
            )
            code, out, message = ended.returncode, ended.stdout.decode("utf-8", "replace"), ""
    except program.Failed as error:
        raise Failed(f"its exec plugin {error}") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"its exec plugin did not end in {limit_s:.0f} s") from None
    except (OSError, ValueError) as error:
        raise Failed(f"its exec plugin cannot be started: {getattr(error, 'strerror', None) or error}") from None
    if code:
        shown = printable(message)[:_LONGEST]
        raise Failed(f"its exec plugin ended with {code}{f': {shown}' if shown else ''}")
    return out


def _parsed(output: str, version: Any) -> dict[str, str]:
    # Its output is never quoted: it has the credentials.
    try:
        found = json.loads(output) if len(output) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("status"), dict):
        raise Failed("its exec plugin printed no ExecCredential")
    if found.get("apiVersion") != version:
        raise Failed("its exec plugin printed an ExecCredential of another apiVersion")
    status = found["status"]
    token, certificate, key = (status.get(each) for each in ("token", "clientCertificateData", "clientKeyData"))
    if isinstance(token, str) and token:
        return {"token": token}
    if isinstance(certificate, str) and isinstance(key, str) and certificate and key:
        return {"client-certificate-data": _encoded(certificate), "client-key-data": _encoded(key)}
    raise Failed("its exec plugin gave neither a token nor a certificate with its key")


def _arguments(plugin: Mapping[str, Any]) -> list[str]:
    given = plugin.get("args") or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise Failed("the args of its exec plugin are no texts")
    return given


def _variables(plugin: Mapping[str, Any]) -> dict[str, str]:
    given = plugin.get("env") or []
    listed: list[Any] = given if isinstance(given, list) else [None]
    if not all(isinstance(each, dict) and {"name", "value"} <= each.keys() for each in listed):
        raise Failed("the env of its exec plugin is no list of names and values")
    return {str(each["name"]): str(each["value"]) for each in listed}


def _about(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster, as such a program gets it."""
    found = {key: cluster[key] for key in _OF_CLUSTER if cluster.get(key)}
    if file := cluster.get("certificate-authority"):
        try:
            found.setdefault("certificate-authority-data", base64.b64encode(Path(file).read_bytes()).decode("ascii"))
        except OSError as error:
            raise Failed(f"the CA {file} cannot be read: {error.strerror}") from None
    listed = cluster.get("extensions")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") == _EXTENSION:
            found["config"] = each.get("extension")
    return found


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")
