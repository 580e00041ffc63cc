"""The SSH jump hosts before BMCs, for the power server: it has no ssh_config, agent or known hosts of its own."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunodes.engine.power import Access
from gpunodes.engine.remote.targets import Target
from gpunodes.errors import WrongInput

_MAX_KEY = 16 << 10


@dataclass
class Jumps:
    """What is gathered of jump hosts, each once; ``documents`` go into the plan, ``keys`` into the Secret."""

    documents: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    _names: dict[tuple[Target, ...], str] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)

    def add(self, machine: str, access: Access | None) -> str:
        """The name in the plan of the jump hosts before a BMC, "" for none; raises WrongInput for unusable ones.

        The power server accepts only the host keys that this controller knows.
        """
        if access is None or not access.jump:
            return ""
        if access.jump not in self._names:
            known = [_known(machine, hop) for hop in access.jump]
            key = self._key(machine, access.jump[0].key_files[0])
            name = str(len(self._names) + 1)
            self.documents[name] = {
                "hops": [
                    {"address": hop.address, "port": hop.port, "user": hop.user, "name": hop.host_key_name}
                    for hop in access.jump
                ],
                "known_hosts": "".join(f"{lines}\n" for lines in dict.fromkeys(known)),
                "key": key,
            }
            self._names[access.jump] = name
        return self._names[access.jump]

    def _key(self, machine: str, file: str) -> str:
        """The name in the Secret of the key in a file."""
        if file not in self._files:
            name = f"JUMP-KEY-{len(self._files) + 1}"
            self.keys[name] = _read_key(machine, Path(file))
            self._files[file] = name
        return self._files[file]


def _known(machine: str, hop: Target) -> str:
    """The lines of known_hosts with the keys of a jump host; raises WrongInput for a host without any."""
    from gpunodes.engine.remote.host_check import HostCheck

    if hop.proxy_command:
        raise WrongInput(
            f"{hop.name} before the BMC of {machine} has a ProxyCommand in ssh_config",
            "a jump host that the control planes reach by TCP",
            "name the hosts in between in gpunodes_bmc_jump, separated by commas",
        )
    if lines := HostCheck().known_lines(hop):
        return lines
    raise WrongInput(
        f"the host key of {hop.name} before the BMC of {machine} is not known to this controller",
        "a known host key, which the power server requires",
        f"run `gpunodes power {machine} status` first",
    )


def _read_key(machine: str, path: Path) -> str:
    from gpunodes.engine.remote.keys import needs_no_passphrase

    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"gpunodes_bmc_jump_key of {machine} cannot be read: {error}", "a private key", "") from error
    wrong = f"has the mode {mode:04o}" if mode & 0o077 else ""
    if not wrong and (len(text) > _MAX_KEY or not needs_no_passphrase(path)):
        wrong = "is no private key, or has a passphrase"
    if wrong:
        raise WrongInput(
            f"the file {path} of gpunodes_bmc_jump_key of {machine} {wrong}",
            "a private key without a passphrase that only its owner can read",
            "make one for this purpose: `ssh-keygen -t ed25519 -N '' -f FILE`",
        )
    return text
