"""Hides secrets in what a module shows: in texts (configuration files) and in objects (those of the API).

It hides too much rather than too little: where the end of a secret is unclear, the rest of the line or text is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMES = (
    r"(?:pass|password|passwd|passphrase|secret|token|auth|authorization|credential|cookie|ca[-_]?bundle"
    r"|(?:access|api|certificate|client|encryption|private|secret)[-_]?key"
    r"|(?:certificate-authority|client-certificate|client-key)-data|dockercfg|dockerconfigjson)s?"
)
"""The end of a name whose value is a secret; ``tokenTTL`` and ``secretName`` are none."""
_HARMLESS = r"[\"']?(?:true|false|null|none|~|\{\}?|\[\]|\(secret \d+\)|)[\"']?[,;]?[ \t]*"
"""Values that are no secrets. After ``{`` each following line has its own name."""
_NAME = re.compile(rf".*{_NAMES}", re.IGNORECASE | re.DOTALL)
_NO_SECRET = re.compile(_HARMLESS, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"^([ \t]*).*?{_NAMES}[\"']?[ \t]*[:=][ \t]*(?!{_HARMLESS}$)(?P<value>\S.*)(?:(?:\n[ \t]*)*\n\1[ \t]+\S.*)*",
    re.IGNORECASE | re.MULTILINE,
)
"""A name and its value, which continues on lines that are further indented, as in YAML and INI."""
_OPEN = re.compile(r"\[[^\]]*|(\"\"\"|''')(?:(?!\1).)*|\"[^\"]*|'[^']*|.*\\")
"""Values that continue on the next lines, whatever their indentation."""
_SHAPES = re.compile(
    r"-----BEGIN (?!PGP PUBLIC KEY)[A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)"  # PEM, also a truncated one
    r"|(?<=://)[^/\s\"']+(?=@)"  # user and password of a URL, up to the last @
    r"|\b(?:Basic|Bearer)[ \t]+[\w.~+/=-]+"  # an HTTP header
    r"|\beyJ[\w-]{1,500}\.[\w-]{1,4000}\.[\w-]*"  # a service account's token (RFC 7519)
    r"|\b[a-z0-9]{6}\.[a-z0-9]{16}\b",  # a bootstrap token
    re.DOTALL,
)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class Secret(str):
    """A text that is secret as a whole."""

    __slots__ = ()


class Mask:
    """Replaces secrets by ``(secret 1)``, ``(secret 2)``, ...: equal secrets by the same text, so that changes show."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def value(self, value: Any, name: str = "") -> Any:
        """``value`` without secrets; ``name`` is the key under which an object has it."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(each, str(key)) for key, each in _marked(value).items()}
        if isinstance(value, (list, tuple)):
            return [self.value(each, name) for each in value]
        if isinstance(value, Secret):
            return self._hidden(value)
        if value is None or isinstance(value, bool):
            return value
        if _NAME.fullmatch(name) and not _NO_SECRET.fullmatch(str(value)):
            return self._hidden(str(value))
        return self.text(value) if isinstance(value, str) else value

    def shapes(self, text: str) -> str:
        """``text`` without what has the shape of a secret, whatever its name: a login in a URL, a token, a key."""
        return _SHAPES.sub(lambda found: self._hidden(found.group()), text)

    def text(self, text: str) -> str:
        """``text`` without secrets, and without characters that UTF-8 cannot encode."""
        shaped = self.shapes(text)
        parts = []
        end = 0
        for found in _ASSIGNED.finditer(shaped):
            parts.append(shaped[end : found.start("value")])
            end = len(shaped) if _OPEN.fullmatch(found["value"].strip()) else found.end()
            parts.append(self._hidden(shaped[found.start("value") : end]))
            if end == len(shaped):
                break
        return "".join([*parts, shaped[end:]]).encode(errors="replace").decode()

    def _hidden(self, secret: str) -> str:
        return f"(secret {self._numbers.setdefault(str(secret), len(self._numbers) + 1)})"


def _marked(obj: Mapping[Any, Any]) -> dict[Any, Any]:
    """An object with its values marked as secret where its other fields determine that."""
    marked = dict(obj)
    if obj.get("kind") == "Secret":
        for name in {"data", "stringData"} & set(marked):
            marked[name] = _all_secret(marked[name])
        metadata = marked.get("metadata")
        annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
        if isinstance(annotations, Mapping) and _LAST_APPLIED in annotations:
            hidden = {**annotations, _LAST_APPLIED: Secret(annotations[_LAST_APPLIED])}
            marked["metadata"] = {**marked["metadata"], "annotations": hidden}
    value = obj.get("value")
    if isinstance(value, str) and _NAME.fullmatch(str(obj.get("name", ""))) and not _NO_SECRET.fullmatch(value):
        # A container's environment variable, or an argument in kubeadm's configuration.
        marked["value"] = Secret(value)
    return marked


def _all_secret(values: Any) -> Any:
    return {key: Secret(each) for key, each in values.items()} if isinstance(values, Mapping) else Secret(values)
