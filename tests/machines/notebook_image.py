"""An image for notebooks, made on a machine of the lab from its own Python; `jupyter` there is tests/jupyter.py."""

from __future__ import annotations

import base64
from pathlib import Path

from .conftest import Operator

NAME = "gpunodes.test/notebook:1"
_STAND_IN = Path(__file__).parents[1] / "jupyter.py"
# Runs on the machine: an archive as `docker save` writes it, for `ctr images import`.
_PROGRAM = """
import base64, glob, hashlib, io, json, os, re, subprocess, sys, tarfile

def entry(tar, name, data, mode=0o644):
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))

def link(tar, name, target):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)

python = os.path.realpath("/usr/bin/python3")
[library] = glob.glob("/usr/lib/" + os.path.basename(python))
# The driver's nvidia-smi, which the container toolkit mounts, needs libraries that Python does not.
files = [python, *glob.glob(library + "/lib-dynload/*.so"), *glob.glob("/usr/bin/nvidia-smi")]
shown = "".join(subprocess.run(["ldd", each], capture_output=True, text=True).stdout for each in files)
libraries = set(re.findall(r"(/\\S+) \\(0x", shown))
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w", dereference=True) as tar:
    for name in ("bin", "lib", "lib64"):
        link(tar, name, "usr/" + name)
    tar.add(python, "usr/bin/python3")
    # With __pycache__: a probe that compiled the modules of each import would take longer than its limit.
    skipped = ("/test", "/idlelib", "/config-")
    tar.add(library, library[1:], filter=lambda each: None if any(one in each.name for one in skipped) else each)
    for each in libraries:
        tar.add(each, (each if each.startswith("/usr/") else "/usr" + each)[1:])
    stand_in = b"#!/usr/bin/python3\\n" + base64.b64decode("STAND_IN")
    entry(tar, "usr/local/bin/jupyter", stand_in, 0o755)
    entry(tar, "etc/passwd", b"root:x:0:0::/root:/bin/sh\\njovyan:x:1000:100::/home/jovyan:/bin/sh\\n")
data = layer.getvalue()
digest = "sha256:" + hashlib.sha256(data).hexdigest()
about = {
    "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
    "os": "linux",
    "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
    "rootfs": {"type": "layers", "diff_ids": [digest]},
}
config = json.dumps(about).encode()
with tarfile.open("/run/notebook.tar", "w") as tar:
    entry(tar, "config.json", config)
    entry(tar, "layer.tar", data)
    index = [{"Config": "config.json", "RepoTags": ["NAME"], "Layers": ["layer.tar"]}]
    entry(tar, "manifest.json", json.dumps(index).encode())
"""


def load(operator: Operator, machine: str) -> None:
    """Make the image on a machine, and import it into its containerd."""
    stand_in = base64.b64encode(_STAND_IN.read_bytes()).decode()
    program = _PROGRAM.replace("NAME", NAME).replace("STAND_IN", stand_in)
    operator.ssh(machine, f"python3 - <<'END'\n{program}\nEND")
    operator.ssh(machine, "ctr -n k8s.io images import /run/notebook.tar && rm /run/notebook.tar")
