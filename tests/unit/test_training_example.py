"""examples/training and examples/serving on loopback: ranks that die go on from the checkpoint, and it is served."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINING = EXAMPLES / "training"
NO_TORCH = "PyTorch is not among the dependencies: hundreds of MB; machines with it run this test"
LIMIT_S = 60.0

np = pytest.importorskip("numpy", reason="the examples of training need NumPy: `make setup` installs it")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def until(seen: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# The options of torchrun, by PyTorch 2.11. It reads those of the script too, and takes unique beginnings for its own.
TORCHRUN = """
nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval
start-method event-log-handler role module no-python run-path log-dir redirects tee local-ranks-filter
duplicate-stdout-filters duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding
signals-to-handle virtual-local-rank help
"""


def test_torchrun_does_not_take_an_option_of_the_script_for_its_own() -> None:
    text = "".join((TRAINING / "base" / name).read_text() for name in ("common.py", "train.py"))
    options = set(re.findall(r'add_argument\(\s*"--([a-z-]+)"', text))
    assert {"data", "tensorboard", "backend"} <= options
    assert [(mine, its) for mine in options for its in TORCHRUN.split() if its.startswith(mine)] == []


class Ranks:
    """The ranks of one job, each a process as its pod would run it."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.script = script
        self.port = free_port()
        for path in (*TRAINING.glob("base/*.py"), *TRAINING.glob("overlays/numpy/*.py")):
            shutil.copy(path, folder)
        self.running: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *more: str) -> subprocess.Popen[str]:
        folders = {"data": "data", "checkpoints": "checkpoints", "tensorboard": "logs"}
        places = [f"--{option}={self.folder / name}" for option, name in folders.items()]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "LOCAL_RANK": "0"}
        process = subprocess.Popen(
            [sys.executable, str(self.folder / self.script), *places, "--every=20", "--timeout=20", *more],
            env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *more: str) -> str:
        """Both ranks to their end; the output of rank 0."""
        both = [self.start(rank, *more) for rank in (1, 0)]
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
        return outputs[1]

    def step(self) -> int:
        """The step of the checkpoint, 0 without one."""
        try:
            with np.load(self.folder / "checkpoints" / "checkpoint.npz") as file:
                return int(file["step"])
        except FileNotFoundError:
            return 0


@pytest.fixture(params=["train_numpy.py", "train.py"])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "train.py" and importlib.util.find_spec("torch") is None:
        pytest.skip(NO_TORCH)
    made = Ranks(tmp_path, request.param)
    load = [sys.executable, str(tmp_path / "load_data.py"), f"--data={tmp_path / 'data'}"]
    first, second = (subprocess.run(load, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == "4096 images written\n"
    assert second == "the images are there already\n"
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", output)]


def test_the_loss_falls_and_a_finished_job_ends_at_once(ranks: Ranks) -> None:
    found = losses(ranks.run("--steps=200"))
    assert len(found) == 10
    assert found[-1] < found[0] / 10
    # A pod that starts again after the end must not wait for ranks that have ended.
    alone = ranks.start(1, "--steps=200")
    assert alone.communicate(timeout=LIMIT_S)[0] == "all 200 steps are done\n"
    assert alone.returncode == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other_and_both_continue(ranks: Ranks, killed: int) -> None:
    both = [ranks.start(rank, "--steps=1000000") for rank in (0, 1)]
    until(ranks.step)
    both[killed].kill()
    both[1 - killed].communicate(timeout=LIMIT_S)
    assert both[1 - killed].returncode == 1
    done = ranks.step()
    output = ranks.run(f"--steps={done + 100}")
    assert f"continuing after step {done}\n" in output
    assert ranks.step() == done + 100
    assert losses(output)[-1] < 2.0


@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_of_one_rank_leaves_a_checkpoint_of_its_last_step(ranks: Ranks, asked: int) -> None:
    both = [ranks.start(rank, "--steps=1000000", "--every=1000000") for rank in (0, 1)]
    until(lambda: list((ranks.folder / "logs").glob("events*")))
    time.sleep(0.5)
    both[asked].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1]
    assert {int(re.findall(r"stopped after step (\d+)", output)[0]) for output in outputs} == {ranks.step()}
    assert ranks.step() > 0


def test_a_checkpoint_of_another_model_and_torn_data_are_not_tried_again(ranks: Ranks) -> None:
    (ranks.folder / "checkpoints").mkdir()
    np.savez(ranks.folder / "checkpoints" / "checkpoint.npz", step=1, other=np.zeros(3))
    refused = ranks.start(0)
    assert "is the checkpoint of another model" in refused.communicate(timeout=LIMIT_S)[0]
    assert refused.returncode == 2
    (ranks.folder / "checkpoints" / "checkpoint.npz").write_bytes(b"PK\x03\x04 torn")
    damaged = ranks.start(0)
    assert "is damaged" in damaged.communicate(timeout=LIMIT_S)[0]
    assert damaged.returncode == 2
    shutil.rmtree(ranks.folder / "checkpoints")
    images = ranks.folder / "data" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    both = [ranks.start(rank) for rank in (0, 1)]
    for process in both:
        assert "load them again" in process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 2


def test_the_scripts_compile_and_have_the_same_arguments() -> None:
    for path in EXAMPLES.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")


def test_the_curve_is_a_file_of_tensorboard(ranks: Ranks) -> None:
    ranks.run("--steps=300", "--every=100")
    [path] = (ranks.folder / "logs").glob("events.out.tfevents.*")
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    assert b"brain.Event:2" in records[0]
    assert len(records) == 4
    # Step 300 as a varint, and the loss with its tag.
    assert b"\x10\xac\x02" in records[-1]
    assert struct.unpack("<f", records[-1][-4:])[0] < 1
    assert b"\x04loss" in records[-1]


def call(url: str, data: bytes | None = None) -> tuple[int, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, data, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, None


def test_the_checkpoint_is_served(ranks: Ranks) -> None:
    port = free_port()
    path = ranks.folder / "checkpoints" / "checkpoint.npz"
    server = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "serving" / "serve.py"), f"--checkpoint={path}", f"--port={port}"],
        stdout=subprocess.DEVNULL,
    )
    base = f"http://127.0.0.1:{port}"
    try:
        until(lambda: call(f"{base}/live")[0] == 200)
        assert call(f"{base}/ready")[0] == 503
        ranks.run("--steps=200")
        until(lambda: call(f"{base}/ready")[0] == 200)
        until(lambda: call(f"{base}/predict", bytes(784))[1]["step"] == 200)
        data = ranks.folder / "data"
        images, labels = (data / name for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"))
        rows, wanted = images.read_bytes()[16:], labels.read_bytes()[8:]
        found = [call(f"{base}/predict", rows[at * 784 : at * 784 + 784])[1] for at in range(50)]
        assert [each["label"] for each in found] == list(wanted[:50])
        assert {each["step"] for each in found} == {200}
        assert call(f"{base}/predict", b"short")[0] == 400
        # A newer checkpoint, then one that is torn: the last good one stays.
        ranks.run("--steps=220")
        until(lambda: call(f"{base}/predict", rows[:784])[1]["step"] == 220)
        path.write_bytes(path.read_bytes()[:100])
        assert call(f"{base}/predict", rows[:784])[1]["step"] == 220
        server.terminate()
        assert server.wait(LIMIT_S) == 0
    finally:
        server.kill()
        server.wait()


def test_a_server_that_starts_slowly_is_not_ended() -> None:
    """Where nobody can save the result, Python compiles NumPy at each start: a second of a fast processor."""
    objects = yaml.safe_load_all((EXAMPLES / "serving" / "serve.yml").read_text())
    [found] = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    [container] = found["containers"]
    probe = container["startupProbe"]
    assert probe["httpGet"] == container["livenessProbe"]["httpGet"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120


def test_a_storage_server_that_does_not_answer_takes_no_answer_away(tmp_path: Path) -> None:
    """A FIFO that nobody writes to: whoever opens it waits, as for a file on a frozen NFS server."""
    path, port = tmp_path / "checkpoint.npz", free_port()
    scores = {"output.weight": np.zeros((10, 4), "f4"), "output.bias": np.arange(10, dtype="f4")}
    inner = {"hidden.weight": np.zeros((4, 784), "f4"), "hidden.bias": np.zeros(4, "f4")}
    with path.open("wb") as file:
        np.savez(file, step=np.int64(7), **scores, **inner)
    server = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "serving" / "serve.py"), f"--checkpoint={path}", f"--port={port}"],
        stdout=subprocess.DEVNULL,
    )
    base = f"http://127.0.0.1:{port}"
    try:
        until(lambda: call(f"{base}/ready")[0] == 200)
        path.unlink()
        os.mkfifo(path)
        time.sleep(5)
        for _ in range(3):
            assert call(f"{base}/ready")[0] == 200
            assert call(f"{base}/predict", bytes(784))[1]["label"] == 9
        server.terminate()
        assert server.wait(LIMIT_S) == 0
    finally:
        server.kill()
        server.wait()


RCLONE = """#!/bin/sh
echo "$@" >>"$CALLS"
test ! -e "$CALLS.fails"
"""


class Store:
    """A container of overlays/s3 for one rank, with a stand-in for rclone that writes down how it is called."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.calls = folder / "calls"
        self.calls.touch()
        (folder / "rclone").write_text(RCLONE)
        (folder / "rclone").chmod(0o755)
        patch = yaml.safe_load((TRAINING / "overlays/s3/checkpoints.yml").read_text())
        containers = patch["spec"]["template"]["spec"]["initContainers"]
        self.commands = {each["name"]: each["command"] for each in containers}
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(self.calls)}
        self.environment = {**os.environ, **own, "BUCKET": "b", "JOB_COMPLETION_INDEX": str(rank)}

    def start(self, name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.commands[name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture(params=[0, 1])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    return Store(tmp_path, request.param)


def test_rank_0_fetches_the_checkpoint_from_s3(store: Store) -> None:
    assert store.start("fetch").wait(LIMIT_S) == 0
    is_first = store.environment["JOB_COMPLETION_INDEX"] == "0"
    assert (
        store.called()
        == ["copy --update --contimeout=20s --low-level-retries=2 s3:b/checkpoints /training/checkpoints"] * is_first
    )


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_checkpoint_on_the_claim_is_enough_while_the_store_is_down(store: Store, has_checkpoint: bool) -> None:
    """Without one the pod waits for the store: what began anew would replace the checkpoint there."""
    Path(f"{store.calls}.fails").touch()
    claim = store.calls.parent / "training"
    (claim / "checkpoints").mkdir(parents=True)
    if has_checkpoint:
        (claim / "checkpoints/checkpoint.npz").touch()
    store.commands["fetch"] = [each.replace("/training/", f"{claim}/") for each in store.commands["fetch"]]
    is_first = store.environment["JOB_COMPLETION_INDEX"] == "0"
    ended = store.start("fetch").wait(LIMIT_S)
    assert bool(ended) is (is_first and not has_checkpoint)


def test_the_last_checkpoint_is_stored_when_the_pod_ends(store: Store) -> None:
    """Also when the store could not be reached before."""
    stored = "copy --update --exclude *.partial /training/checkpoints s3:b/checkpoints"
    is_first = store.environment["JOB_COMPLETION_INDEX"] == "0"
    failing = Path(f"{store.calls}.fails")
    failing.touch()
    process = store.start("store")
    try:
        if is_first:
            assert process.stdout
            assert process.stdout.readline() == "not stored; trying again in a minute\n"
        else:
            time.sleep(0.5)
        failing.unlink()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert store.called() == [stored] * (2 * is_first)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
