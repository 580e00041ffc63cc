"""Train on several nodes with PyTorch: one process per GPU or CPU pod, as torchrun starts them.

Replace the model and the data with yours; what makes it survive restarts is the rest.
"""

from __future__ import annotations

import datetime as dt
import os
from argparse import Namespace
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    """The model of common.SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        (_, pixels), (digits, hidden) = common.SHAPES["hidden.weight"], common.SHAPES["output.weight"]
        self.hidden = nn.Linear(pixels, hidden)
        self.output = nn.Linear(hidden, digits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(torch.relu(self.hidden(images)))
        return scores


def to_arrays(network: nn.Module) -> common.Arrays:
    """The model as a checkpoint has it."""
    return {name: value.detach().cpu().numpy() for name, value in network.state_dict().items()}


def train(options: Namespace, device: torch.device) -> int:
    """Train until all steps are done, or until any rank got SIGTERM; returns the exit status."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stop = common.Stop()
    images, labels = common.read_data(options.data, options.patience)
    step, model = 0, common.new_model(options.seed)
    if rank == 0 and (found := common.load(options.checkpoints)):
        step, model = found
        print(f"continuing after step {step}", flush=True)
    network = Network().to(device)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in model.items()})
    # DistributedDataParallel sends the model of rank 0 to all; the step goes the same way.
    begin = torch.tensor([step], device=device)
    dist.broadcast(begin, 0)
    step = int(begin.item())
    parallel = DistributedDataParallel(network, device_ids=[device.index] if device.type == "cuda" else None)
    # An optimizer with a state of its own belongs into the checkpoint, too.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=options.rate)
    curve = common.Curve(options.tensorboard) if rank == 0 else None
    while step < options.steps:
        mine = common.batch_of(step, rank, ranks, options.batch, len(labels), options.seed)
        loss = _step(parallel, optimizer, images[mine], labels[mine], device)
        together = torch.stack([loss, torch.tensor(float(bool(stop)), device=device)])
        dist.all_reduce(together)
        step += 1
        stopped = bool(together[1].item())
        if curve and (step % options.every == 0 or step == options.steps or stopped):
            common.save(options.checkpoints, step, to_arrays(network))
            curve.add(step, together[0].item() / ranks)
            print(f"step {step} loss {together[0].item() / ranks:.4f}", flush=True)
        if stopped:
            print(f"stopped after step {step}", flush=True)
            return common.AGAIN
    # Nobody ends before the last checkpoint is written: who starts again after that finds all steps done.
    dist.barrier()
    return 0


def _step(network: nn.Module, optimizer: Any, images: Any, labels: Any, device: torch.device) -> torch.Tensor:
    optimizer.zero_grad()
    scores = network(torch.from_numpy(images).to(device))
    loss = nn.functional.cross_entropy(scores, torch.from_numpy(labels).to(device))
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    parser = common.arguments()
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="nccl for GPUs")
    options = parser.parse_args()
    if common.finished(options):
        return
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, timeout=dt.timedelta(seconds=options.timeout))
    code = train(options, device)
    dist.destroy_process_group()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
