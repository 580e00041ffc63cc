"""Real SSH servers on loopback addresses, ended with the context that started them. The benchmarks use them too."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.programs import ending

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")

_CONFIG = """
HostKey {key}
AuthorizedKeysFile {folder}/login.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
UseDNS no
PrintMotd no
MaxStartups 100
LogLevel ERROR
SetEnv SHLVL=2
"""
# The last line keeps bash from reading ~/.bashrc for each connection: a developer's file would change measurements.


@dataclass(frozen=True, slots=True)
class Servers:
    """The folder of the servers, and their keys. ``login`` is the private key for logins."""

    folder: Path
    login: Path
    host_key: Path


def free_ports(number: int, address: str = "127.0.0.1") -> list[int]:
    """Ports without a listener."""
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(number)]
        for each in sockets:
            each.bind((address, 0))
        return [each.getsockname()[1] for each in sockets]


def new_key(path: Path) -> Path:
    """A key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True)
    return path


@contextlib.contextmanager
def serving(
    folder: Path,
    processes: Sequence[Mapping[tuple[str, int], str]],
    prepare: Callable[[Servers], str] = lambda _: "",
) -> Iterator[Servers]:
    """Run one sshd for each mapping of addresses and ports to a forced command ("" for none).

    ``prepare`` returns further lines for their configuration.
    """
    assert SSHD is not None
    # The privilege separation directory of Debian's sshd, which its service normally creates.
    Path("/run/sshd").mkdir(exist_ok=True)
    servers = Servers(folder, new_key(folder / "login"), new_key(folder / "host"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, addresses in enumerate(processes):
            text = "".join(f"ListenAddress [{address}]:{port}\n" for address, port in addresses)
            text += _CONFIG.format(key=servers.host_key, folder=folder) + prepare(servers)
            text += "".join(
                f"Match LocalAddress {address} LocalPort {port}\n  ForceCommand {command}\n"
                for (address, port), command in addresses.items()
                if command
            )
            config = folder / f"sshd-{number}.conf"
            config.write_text(text)
            with (folder / f"sshd-{number}.log").open("wb") as log:
                argv = ending([SSHD, "-D", "-e", "-f", config])
                started.append(subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL))
        for addresses in processes:
            for address in addresses:
                _wait_for(address)
        yield servers
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def _wait_for(address: tuple[str, int]) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(f"no sshd at {address}")
