"""What both training scripts share: arguments, images, checkpoints, TensorBoard's files, and the end by SIGTERM.

A checkpoint is a file of NumPy with the model's arrays and the number of steps. Needs NumPy and the standard library.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from load_data import IMAGES, LABELS, SIDE

HIDDEN, DIGITS = 64, 10
SHAPES = {
    "hidden.weight": (HIDDEN, SIDE * SIDE),
    "hidden.bias": (HIDDEN,),
    "output.weight": (DIGITS, HIDDEN),
    "output.bias": (DIGITS,),
}
"""The arrays of the model, by PyTorch's names."""
CHECKPOINT = "checkpoint.npz"
AGAIN, WRONG = 1, 2
"""Exit statuses: begin again from the checkpoint; no retry helps."""
Arrays = dict[str, Any]


def arguments() -> argparse.ArgumentParser:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description="Train a small network on images of ten shapes.")
    parser.add_argument("--data", type=Path, required=True, help="the folder with the images")
    parser.add_argument("--checkpoints", type=Path, required=True, help="the folder for the checkpoint")
    parser.add_argument("--tensorboard", type=Path, required=True, help="the folder for TensorBoard")
    parser.add_argument("--steps", type=int, default=2000, help="the number of steps in all")
    parser.add_argument("--batch", type=int, default=64, help="images of a step, for each rank")
    parser.add_argument("--rate", type=float, default=0.05, help="the learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for the data and for all ranks")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without another rank until this one ends")
    return parser


def read_data(folder: Path, patience_s: float) -> tuple[Any, Any]:
    """The images, as rows from 0 to 1, and their labels; ends the process if there are none in time."""
    deadline = time.monotonic() + patience_s
    while not (folder / LABELS).exists() or not (folder / IMAGES).exists():
        if time.monotonic() > deadline:
            fail(AGAIN, f"no {LABELS} in {folder} after {patience_s:.0f} s; see `kubectl logs job/load-data`")
        time.sleep(1)
    images, labels = (folder / IMAGES).read_bytes(), (folder / LABELS).read_bytes()
    count, height, width = struct.unpack(">III", images[4:16])
    if (height, width) != (SIDE, SIDE) or len(images) != 16 + count * SIDE * SIDE or len(labels) != 8 + count:
        fail(
            WRONG, f"{folder} has no images of {SIDE} by {SIDE} with a label each; delete its files and load them again"
        )
    rows = np.frombuffer(images, np.uint8, offset=16).reshape(count, SIDE * SIDE)
    return rows.astype(np.float32) / 255, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def batch_of(step: int, rank: int, ranks: int, size: int, count: int, seed: int) -> Any:
    """Which images a rank uses in a step: the same after a restart, and others for each rank."""
    return np.random.default_rng([seed, step]).integers(count, size=size * ranks)[rank::ranks]


def new_model(seed: int) -> Arrays:
    """A model that has learned nothing."""
    source = np.random.default_rng(seed)
    return {
        name: source.normal(0, shape[-1] ** -0.5, shape).astype(np.float32) if len(shape) > 1 else np.zeros(shape, "f4")
        for name, shape in SHAPES.items()
    }


def load(folder: Path) -> tuple[int, Arrays] | None:
    """The steps and the model of the checkpoint; None without one. Raises ValueError for any other file."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged: {error}; delete it, or put an older one in its place") from error
    step = found.pop("step", None)
    if step is None or {name: array.shape for name, array in found.items()} != SHAPES:
        raise ValueError(f"{path} is the checkpoint of another model: delete it, or use another folder")
    return int(step), found


def save(folder: Path, step: int, model: Mapping[str, Any]) -> None:
    """Replace the checkpoint in one step: a power cut leaves the old one or the new one, never half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{CHECKPOINT}.partial"
    with partial.open("wb") as file:
        np.savez(file, step=np.int64(step), **model)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / CHECKPOINT)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finished(options: argparse.Namespace) -> bool:
    """Whether all steps are done: then a rank that starts again must not wait for others, which have ended."""
    try:
        found = load(options.checkpoints)
    except ValueError as error:
        fail(WRONG, str(error))
    if found is None or found[0] < options.steps:
        return False
    print(f"all {options.steps} steps are done", flush=True)
    return True


def fail(code: int, message: str) -> None:
    """End the process with a message."""
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)


class Stop:
    """True after SIGTERM: the node is drained, or the Job deleted."""

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, *_: object) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested


class Curve:
    """The loss in a file of TensorBoard: records of protocol buffers, each with its length and checksums.

    Written by hand, so that neither image needs the package tensorboard.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = (folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}").open("wb")
        self._record(b"\x09" + struct.pack("<d", now) + b"\x1a\x0dbrain.Event:2")

    def add(self, step: int, loss: float) -> None:
        """Add one point."""
        value = b"\x0a\x04loss\x15" + struct.pack("<f", loss)
        summary = b"\x0a" + bytes([len(value)]) + value
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + b"\x2a" + bytes([len(summary)])
        self._record(event + summary)

    def close(self) -> None:
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
        self._file.flush()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as TensorFlow does it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
