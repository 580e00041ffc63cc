"""The check of a machine's host key during the key exchange, by the files and rules that ssh would use."""

from __future__ import annotations

import base64
import subprocess
import threading
from pathlib import Path

import paramiko

from gpunodes import settings
from gpunodes.engine.remote import hostkeys, openssh, packetizer
from gpunodes.engine.remote.hostkeys import HostKeys, Trust
from gpunodes.engine.remote.reach import LostError, Reach
from gpunodes.engine.remote.targets import Target

_COMMAND_S = 20.0
"""Time limit in seconds for KnownHostsCommand."""
_KRL = b"SSHKRL\n\0"
_CERTIFICATE = "-cert-v01@openssh.com"


class HostCheck:
    """The checks of one scan; each known_hosts file is read once. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._host_keys: dict[tuple[str, ...], HostKeys] = {}

    def prefer(self, transport: paramiko.Transport, target: Target) -> None:
        """Request the types of the keys that are known, to be able to compare; raises LostError."""
        security = transport.get_security_options()
        name = target.host_key_name
        host_keys, _ = self._keys_for(target, _from_known_hosts_command(target))
        if known := host_keys.types(name):
            # As ssh does.
            preferred = [kind for kind in security.key_types if any(_can_sign_with(kind, each) for each in known)]
            security.key_types = [*preferred, *(kind for kind in security.key_types if kind not in preferred)]
        if host_keys.certified(name) or target.rules.revoked:
            # As ssh does: prefer a certificate to any key; its authority may be revoked.
            plain = security.key_types
            certified = [f"{kind}{_CERTIFICATE}" for kind in plain]
            security.key_types = [*(kind for kind in certified if packetizer.can_verify(transport, kind)), *plain]

    def verify(self, key: paramiko.PKey, target: Target) -> None:
        """Check the key that a machine has; a new key is learned where that is allowed. Raises LostError."""
        name = target.host_key_name
        shown = key.public_blob.key_blob if key.public_blob else b""
        host_keys, strict = self._keys_for(target, _from_known_hosts_command(target, key, shown))
        if any(_revoked(Path(file), key, shown) for file in target.rules.revoked):
            trust = Trust.REVOKED
        else:
            trust = host_keys.judge(name, key.get_name(), key.asbytes(), shown, strict=strict)
        if trust not in {Trust.NEW, Trust.KNOWN}:
            remedy = _remedy(trust, name, learned=not strict)
            raise LostError(
                Reach.KEY_UNKNOWN if trust is Trust.UNKNOWN else Reach.KEY_CHANGED,
                f"its host key {trust.value}: {key.get_name()} {key.fingerprint}; {remedy}",
            )

    def known_lines(self, target: Target) -> str:
        """The lines of known_hosts with the keys of a machine, and those that revoke keys; "" if no key is known.

        Another program can check the machine by them.
        """
        files = target.rules.files
        configured = (*openssh.user_known_hosts(), *openssh.GLOBAL_KNOWN_HOSTS) if files is None else files
        for sources in (configured, () if target.rules.strict else (str(settings.known_hosts()),)):
            text = "".join(_text_of(Path(file)) for file in sources)
            if found := hostkeys.lines_with(text, target.host_key_name):
                return found
        return ""

    def _keys_for(self, target: Target, more: str) -> tuple[HostKeys, bool]:
        """The host keys to check a machine against, and whether its key must be one of them.

        ``more`` holds further known_hosts lines. The keys that gpunodes has learned are used only where the files of
        the user and of the system have no key of the machine.
        """
        files = target.rules.files
        configured = (*openssh.user_known_hosts(), *openssh.GLOBAL_KNOWN_HOSTS) if files is None else files
        found = self._read_keys((*configured, more))
        if target.rules.strict or found.knows(target.host_key_name):
            return found, True
        return self._read_keys((str(settings.known_hosts()), *configured, more)), False

    def _read_keys(self, sources: tuple[str, ...]) -> HostKeys:
        *files, more = sources
        if more:
            return HostKeys([Path(file) for file in files], more)
        with self._mutex:
            if sources not in self._host_keys:
                self._host_keys[sources] = HostKeys([Path(file) for file in files])
            return self._host_keys[sources]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") + "\n"
    except OSError:
        # As ssh does.
        return ""


def _remedy(trust: Trust, name: str, *, learned: bool) -> str:
    if trust is Trust.UNKNOWN and learned:
        return f"{settings.known_hosts()} cannot be written"
    if trust is Trust.UNKNOWN:
        return (
            "ssh_config, or a certificate authority in known_hosts, does not allow new keys: "
            "if the key is right, add it to known_hosts"
        )
    if trust is Trust.REVOKED:
        return "another host may use that key: replace the key of the machine"
    if trust is Trust.INVALID:
        return "its name, its validity or its signature is wrong: issue a new certificate"
    if not learned:
        return "known_hosts of the user or of the system holds another key: if the new key is right, correct it there"
    return f"if the new key is right, run `ssh-keygen -R '{name}' -f {settings.known_hosts()}`"


def _from_known_hosts_command(target: Target, key: paramiko.PKey | None = None, certificate: bytes = b"") -> str:
    """The known_hosts lines that KnownHostsCommand prints for a machine.

    As ssh does, it runs before the key exchange and again with the machine's key. Raises LostError where ssh would
    give up.
    """
    if not target.rules.command:
        return ""
    kind, blob = _public_key(key, certificate) if key else ("NONE", "NONE")
    tokens = {"%%": "%", "%f": key.fingerprint if key else "NONE", "%K": blob, "%t": kind}
    tokens["%I"] = "HOSTNAME" if key else "ORDER"
    tokens["%H"] = target.host_key_name if key else target.address
    argv = [openssh.expand(word, tokens) for word in target.rules.command]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LostError(Reach.KEY_UNKNOWN, f"KnownHostsCommand failed: {error}") from error
    return hostkeys.lines_of(done.stdout.decode("utf-8", "replace"), target.host_key_name)


def _revoked(path: Path, key: paramiko.PKey, certificate: bytes) -> bool:
    """Whether a file of RevokedHostKeys has this key, its certificate, or the authority of that.

    As with ssh, a file that cannot be read revokes every key.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return True
    if not data.startswith(_KRL):
        return hostkeys.is_among(data.decode("utf-8", "replace"), key.asbytes(), certificate)
    done = subprocess.run(
        ["ssh-keygen", "-Q", "-f", path, "/dev/stdin"],
        input=f"{' '.join(_public_key(key, certificate))}\n".encode(),
        capture_output=True,
        check=False,
    )
    return done.returncode != 0


def _public_key(key: paramiko.PKey, certificate: bytes) -> tuple[str, str]:
    """The type of a key, or of its certificate, and the same in base64."""
    blob = certificate or key.asbytes()
    return hostkeys.kind(blob), base64.b64encode(blob).decode()


def _can_sign_with(algorithm: str, kind: str) -> bool:
    """Whether a key of this type can sign with this algorithm: ssh-rsa keys sign with rsa-sha2-*, too."""
    return algorithm == kind or (kind == "ssh-rsa" and algorithm.startswith("rsa-sha2-"))
