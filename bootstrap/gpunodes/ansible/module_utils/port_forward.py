"""Forwards a loopback port of this control-plane machine to a pod: a program for the controller's tunnel.

`kubectl port-forward` does it, over the API server and the kubelet: the pod's server may listen on its loopback
address only, and no NetworkPolicy has to let anything in. The output is one JSON document per line: {"state":
"forwarding"} once the port is open, then {"state": "alive"} every few seconds, which also ends the program when nobody
reads it any more, and {"state": "ended", "reason": ...}. The program, with kubectl, ends with standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import urlsplit

from . import kubeconfig, tree

BEAT_S = 10.0
_START_S = 30.0
_CONNECT_S = 5.0
_END_S = 5.0
_MOST = 400


def main(options: Mapping[str, Any]) -> None:
    """Forward ``local`` to ``port`` of ``pod`` in ``namespace``, with the file ``kubeconfig``."""
    signal.signal(signal.SIGTERM, _end)
    kubectl = shutil.which("kubectl", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin")
    config = kubeconfig.load(str(options["kubeconfig"]))
    if kubectl is None or config is None:
        _say("ended", "kubectl is not installed there" if config else f"{options['kubeconfig']} does not exist there")
        return
    # kubectl keeps what it learns of the API below HOME: nothing stays on the machine. It would use a proxy, too.
    folder = tempfile.mkdtemp(prefix="gpunodes-forward-")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment.update(HOME=folder, KUBERC="off")
    argv = [kubectl, f"--kubeconfig={options['kubeconfig']}", f"--namespace={options['namespace']}", *_own(config)]
    argv += ["port-forward", "--address=127.0.0.1", f"pod/{options['pod']}", f"{options['local']}:{options['port']}"]
    try:
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            _follow(process)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                # One that hangs in the kernel survives this, too: it is not waited for.
                process.kill()
    finally:
        tree.remove(folder)


def _own(config: kubeconfig.Kubeconfig) -> list[str]:
    """The flag for the API server of this machine itself, if that accepts connections; else the endpoint is used."""
    address = urlsplit(config.own)
    with contextlib.suppress(OSError, ValueError):
        if address.hostname:
            socket.create_connection((address.hostname, address.port or 443), _CONNECT_S).close()
            return [f"--server={config.own}"]
    return []


def _follow(process: subprocess.Popen[bytes]) -> None:
    """Report what kubectl does, until it or standard input ends."""
    opened, errors = threading.Event(), [b""]
    for pipe, take in ((process.stdout, _waiting_for(opened)), (process.stderr, _last_of(errors))):
        threading.Thread(target=_read, args=(pipe, take), daemon=True).start()
    began = last = time.monotonic()
    is_open = False
    while process.poll() is None:
        if not is_open and opened.wait(0.05):
            is_open = True
            _say("forwarding")
        if not is_open and time.monotonic() - began > _START_S:
            _say("ended", f"kubectl opened no port within {_START_S:.0f} s")
            return
        # Not before it is open: the first line says whether it is.
        if is_open and time.monotonic() - last > BEAT_S:
            last = time.monotonic()
            _say("alive")
        if select.select([0], [], [], 0.5 if is_open else 0)[0] and not os.read(0, 4096):
            return
    # The reader of its errors may be behind.
    time.sleep(0.2)
    _say("ended", errors[0].decode("utf-8", "replace").strip() or f"kubectl ended with {process.returncode}")


def _read(pipe: IO[bytes], take: Any) -> None:
    for line in iter(lambda: pipe.readline(_MOST), b""):
        take(line)


def _waiting_for(opened: threading.Event) -> Any:
    return lambda line: opened.set() if line.startswith(b"Forwarding from ") else None


def _last_of(errors: list[bytes]) -> Any:
    return lambda line: errors.__setitem__(0, line) if line.strip() else None


def _say(state: str, reason: str = "") -> None:
    sys.stdout.write(json.dumps({"state": state, "reason": reason[:_MOST]}) + "\n")
    sys.stdout.flush()


def _end(*_: object) -> None:
    """Handle a signal: end with all clean-up."""
    raise SystemExit(1)
