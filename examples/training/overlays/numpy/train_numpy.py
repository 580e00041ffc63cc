"""Train on several nodes with NumPy: rank 0 adds up the gradients of all ranks over plain sockets.

The arguments, the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and the checkpoint are those of train.py.
"""

from __future__ import annotations

import os
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import common
import numpy as np

_HELLO = b"rank"


class Group:
    """All ranks of a run; every method raises OSError if one of them is lost."""

    def __init__(self, rank: int, size: int, address: tuple[str, int], patience_s: float, timeout_s: float) -> None:
        self._rank = rank
        deadline = time.monotonic() + patience_s
        found = self._accept(size, address[1], deadline) if rank == 0 else {0: self._connect(address, deadline)}
        self._others = [found[each] for each in sorted(found)]
        for other in self._others:
            other.settimeout(timeout_s)
            # A node without power sends nothing: without a timeout this rank would wait for ever.
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def sum(self, vector: Any) -> Any:
        """The sum of the vectors of all ranks, on all ranks."""
        if self._rank:
            self._others[0].sendall(vector.tobytes())
            return self._receive(self._others[0], vector.nbytes)
        total = vector.copy()
        for other in self._others:
            total += self._receive(other, vector.nbytes)
        for other in self._others:
            other.sendall(total.tobytes())
        return total

    def close(self) -> None:
        for other in self._others:
            other.close()

    def _accept(self, size: int, port: int, deadline: float) -> dict[int, socket.socket]:
        found: dict[int, socket.socket] = {}
        # A dual-stack socket where the system has IPv6: pods may have either.
        with socket.create_server(("", port)) as server:
            while len(found) < size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                other, _ = server.accept()
                other.settimeout(5)
                try:
                    hello = self._exactly(other, 8)
                except OSError:
                    other.close()
                    continue
                rank = int.from_bytes(hello[4:], "big")
                if hello[:4] != _HELLO or not 0 < rank < size:
                    other.close()
                    continue
                if rank in found:  # it started again while this rank waited
                    found[rank].close()
                found[rank] = other
        return found

    def _connect(self, address: tuple[str, int], deadline: float) -> socket.socket:
        while True:
            try:
                other = socket.create_connection(address, 5)
                other.sendall(_HELLO + self._rank.to_bytes(4, "big"))
            except OSError:  # also while the name is unknown: the pod of rank 0 may not exist yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return other

    def _receive(self, other: socket.socket, size: int) -> Any:
        return np.frombuffer(self._exactly(other, size), np.float64)

    @staticmethod
    def _exactly(other: socket.socket, size: int) -> bytes:
        parts, left = [], size
        while left:
            part = other.recv(left)
            if not part:
                raise ConnectionError("the other rank ended")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def gradients(model: common.Arrays, images: Any, labels: Any) -> tuple[float, common.Arrays]:
    """The mean loss of a batch, and its gradients."""
    inner = np.maximum(images @ model["hidden.weight"].T + model["hidden.bias"], 0)
    scores = inner @ model["output.weight"].T + model["output.bias"]
    scores -= scores.max(axis=1, keepdims=True)
    odds = np.exp(scores)
    odds /= odds.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(odds[rows, labels] + 1e-12).mean()
    odds[rows, labels] -= 1
    odds /= len(labels)
    back = (odds @ model["output.weight"]) * (inner > 0)
    found = (back.T @ images, back.sum(axis=0), odds.T @ inner, odds.sum(axis=0))
    return float(loss), dict(zip(common.SHAPES, found, strict=True))


def flat(model: common.Arrays, *more: float) -> Any:
    """A model as one vector, with further numbers at its end."""
    return np.concatenate([*(model[name].ravel() for name in common.SHAPES), more]).astype(np.float64)


def arrays(vector: Any) -> common.Arrays:
    """The model of a vector."""

    def parts() -> Iterator[tuple[str, Any]]:
        at = 0
        for name, shape in common.SHAPES.items():
            size = int(np.prod(shape))
            yield name, vector[at : at + size].reshape(shape).astype(np.float32)
            at += size

    return dict(parts())


def train(options: Namespace, group: Group, rank: int, ranks: int) -> int:
    """Train until all steps are done, or until any rank got SIGTERM; returns the exit status."""
    stop = common.Stop()
    images, labels = common.read_data(options.data, options.patience)
    step, model = 0, common.new_model(options.seed)
    if rank == 0 and (found := common.load(options.checkpoints)):
        step, model = found
        print(f"continuing after step {step}", flush=True)
    # All begin with the model and the step of rank 0.
    begin = flat(model, step) if rank == 0 else np.zeros(flat(model, step).shape)
    begin = group.sum(begin)
    model, step = arrays(begin), int(begin[-1])
    curve = common.Curve(options.tensorboard) if rank == 0 else None
    while step < options.steps:
        mine = common.batch_of(step, rank, ranks, options.batch, len(labels), options.seed)
        loss, changes = gradients(model, images[mine], labels[mine])
        total = group.sum(flat(changes, loss, float(bool(stop))))
        for name, change in arrays(total).items():
            model[name] -= options.rate * change / ranks
        step += 1
        loss, stopped = total[-2] / ranks, total[-1] > 0
        if curve and (step % options.every == 0 or step == options.steps or stopped):
            common.save(options.checkpoints, step, model)
            curve.add(step, loss)
            print(f"step {step} loss {loss:.4f}", flush=True)
        if stopped:
            print(f"stopped after step {step}", flush=True)
            return common.AGAIN
    # Nobody ends before the last checkpoint is written: who starts again after that finds all steps done.
    group.sum(np.zeros(1))
    return 0


def main() -> None:
    options = common.arguments().parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if common.finished(options):
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        group = Group(rank, ranks, address, options.patience, options.timeout)
        code = train(options, group, rank, ranks)
    except OSError as error:
        common.fail(common.AGAIN, f"rank {rank} lost another rank: {error}")
    else:
        group.close()
        raise SystemExit(code)


if __name__ == "__main__":
    main()
