"""The private keys for logins: those in files, and those of the SSH agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko

from gpunodes.engine.remote.targets import DEFAULT_KEYS, Target


def needs_no_passphrase(path: Path) -> bool:
    """Whether a file is a private key that a program can use without anybody who types."""
    try:
        paramiko.PKey.from_path(path)
    except (OSError, ValueError, TypeError, paramiko.SSHException):
        return False
    return True


class PrivateKeys:
    """The keys for the logins of one scan, each read once. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._keys: dict[str, paramiko.PKey | None] = {}
        self._agent: list[paramiko.PKey] | None = None

    def of(self, target: Target) -> Iterator[paramiko.PKey]:
        """The keys to try, in order: those of the inventory, then those of the agent."""
        named = [Path(file) for file in target.key_files]
        for path in named or [Path(name).expanduser() for name in DEFAULT_KEYS]:
            if key := self._key(str(path)):
                yield key
        if not target.identities_only:
            yield from self._agent_keys()

    def _key(self, path: str) -> paramiko.PKey | None:
        with self._mutex:
            if path not in self._keys:
                try:
                    self._keys[path] = paramiko.PKey.from_path(path)
                except (OSError, ValueError, TypeError, paramiko.SSHException):
                    # The file is missing, or a passphrase protects it: then the agent may have the key.
                    self._keys[path] = None
            return self._keys[path]

    def _agent_keys(self) -> list[paramiko.PKey]:
        with self._mutex:
            if self._agent is None:
                lock = threading.Lock()
                try:
                    keys = paramiko.Agent().get_keys() if os.environ.get("SSH_AUTH_SOCK") else ()
                except (OSError, paramiko.SSHException):
                    keys = ()
                self._agent = [_AgentKey(key, lock) for key in keys]
            return self._agent


class _AgentKey(paramiko.AgentKey):  # type: ignore[misc]  # paramiko has no types
    """A key of the agent. All keys share one connection to the agent, so signatures are serialized."""

    def __init__(self, key: paramiko.AgentKey, lock: threading.Lock) -> None:
        super().__init__(key.agent, key.blob)
        self._lock = lock

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        with self._lock:
            signed: bytes = super().sign_ssh_data(data, algorithm)
            return signed
