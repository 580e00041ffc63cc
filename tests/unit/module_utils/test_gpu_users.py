"""Users of GPUs: real devices and files in a mount namespace, and a file whose server is silent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import gpu_users

NAMESPACE = ["unshare", "--mount", "--propagation=private", *(["--map-root-user"] if os.geteuid() else [])]
# /dev/null, at the places of GPUs, has the number that the list of devices gives to NVIDIA's driver.
SETUP = """
import json, os, subprocess, sys, threading
from gpunodes.ansible.module_utils import gpu_users

folder = sys.argv[1]
open(folder + "/null", "w").close()
open(folder + "/devices", "w").write("Character devices:\\n  1 nvidia\\n  5 tty\\n\\nBlock devices:\\n  8 nvidia\\n")
subprocess.run(["mount", "--bind", "/dev/null", folder + "/null"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev"], check=True)
text = gpu_users._text
gpu_users._text = lambda path: text(folder + "/devices" if path == "/proc/devices" else path)

def gpu(name):
    open(name, "w").close()
    subprocess.run(["mount", "--bind", folder + "/null", name], check=True)

def found(names="nvidia[0-9]+"):
    return [each.pid for each in gpu_users.find(names)]
"""


def in_namespace(folder: Path, script: str) -> Any:
    """Run a script in a mount namespace; its output."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts need root, or unprivileged user namespaces")
    argv = [*NAMESPACE, sys.executable, "-c", SETUP + script, str(folder)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_an_open_device_of_the_driver_counts(tmp_path: Path) -> None:
    """A pod without a GPU may have a file at its place, or another device, or only look at it."""
    found = in_namespace(
        tmp_path,
        """
gpu("/dev/nvidia0")
results = {"nothing": found()}
plain = open("/dev/nvidia1", "w")
results["file"] = found()
path = os.open("/dev/nvidia0", os.O_PATH)
results["path"] = found()
device = os.open("/dev/nvidia0", os.O_RDWR)
results["device"] = found() == [os.getpid()]
results["another GPU"] = found("nvidia7")
open(folder + "/devices", "w").write("Character devices:\\n195 nvidia\\n\\nBlock devices:\\n  1 nvidia\\n")
results["foreign"] = found()
print(json.dumps(results))
""",
    )
    assert found == {
        "nothing": [],
        "file": [],
        "path": [],
        "device": True,
        "another GPU": [],
        "foreign": [],
    }


SILENT = """
import ctypes, struct
fuse = os.open(folder + "/fuse", os.O_RDWR)
options = "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % fuse
if ctypes.CDLL(None).mount(b"x", b"/dev", b"fuse", 0, options.encode()):
    print(json.dumps(None))
    raise SystemExit(0)

def attributes(inode, mode):
    return struct.pack("<6Q10I", inode, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

silent = False

def serve():
    # INIT, LOOKUP, GETATTR and OPEN; what is valid for 0 s must be asked for again (include/uapi/linux/fuse.h).
    while True:
        request = os.read(fuse, 1 << 17)
        if silent:
            return
        _, code, unique, inode = struct.unpack_from("<IIQQ", request)
        answer = {
            26: struct.pack("<IIIIHHIIHHI", 7, 31, 65536, 0, 0, 0, 65536, 0, 0, 0, 0).ljust(64, b"\\0"),
            1: struct.pack("<QQQQII", 2, 0, 0, 0, 0, 0) + attributes(2, 0o100644),
            3: struct.pack("<QII", 0, 0, 0) + attributes(inode, 0o40755 if inode == 1 else 0o100644),
            14: struct.pack("<QII", 5, 0, 0),
        }.get(code)
        os.write(fuse, struct.pack("<IiQ", 16 + len(answer or b""), 0 if answer else -38, unique) + (answer or b""))

threading.Thread(target=serve, daemon=True).start()
holder = subprocess.Popen(["sh", "-c", "exec 7</dev/nvidia0; echo open; exec sleep 60"], stdout=subprocess.PIPE)
holder.stdout.readline()
silent = True
print(json.dumps([os.readlink("/proc/%d/fd/7" % holder.pid), found()]), flush=True)
holder.kill()
os._exit(0)
"""


def test_a_silent_server_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """The file at the GPU's place may be one of NFS or FUSE: os.stat would wait for its server."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    (tmp_path / "fuse").symlink_to(f"/proc/{os.getpid()}/root/dev/fuse")
    found = in_namespace(tmp_path, SILENT)
    if found is None:
        pytest.skip("FUSE cannot be mounted")
    assert found == ["/dev/nvidia0", []]


def test_the_driver_s_numbers() -> None:
    devices = (
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n234 nvidia-caps\n"
        "508 nvidia-uvm\n509 nvidia-nvswitch\n226 drm\n\nBlock devices:\n  7 loop\n  8 nvidia\n"
    )
    assert gpu_users._majors(devices) == {195, 234, 508, 509}
    assert gpu_users._majors("195 nvidia-frontend\n") == {195}


def test_names_are_one_printable_line_whatever_bytes_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices").write_text("195 nvidia\n")
    (tmp_path / "8/fd").mkdir(parents=True)
    (tmp_path / "8/fd/3").symlink_to("/dev/nvidia0")
    (tmp_path / "8/comm").write_bytes(b"a\xff\n\x1b[2J\n")
    monkeypatch.setattr(gpu_users, "_major", lambda _: 195)
    assert gpu_users.find(r"nvidia\d+", str(tmp_path)) == [gpu_users.GpuUser(8, "a\ufffd ?[2J", "")]
