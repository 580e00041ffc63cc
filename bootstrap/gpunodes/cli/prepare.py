"""gpunodes prepare"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.operations import checked
from gpunodes.operations.prepare import OPERATION


class _DeviceId(click.ParamType[str]):
    """A PCI device id."""

    name = "id"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002 - click's signature
        if not re.fullmatch(r"[0-9A-Fa-f]{4}", value):
            raise WrongInput(
                f"{value!r} is not a PCI device id",
                "four hexadecimal digits, such as 2330 for the H100 SXM5",
                "correct --gpu-device; `lspci -nn -d 10de:` on a machine with these GPUs shows 10de:ID",
            )
        return value.lower()


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option(
    "--gpu-device",
    type=_DeviceId(),
    metavar="ID",
    multiple=True,
    help="PCI device id of GPUs that machines with this disk will have, such as 2330, if this one has none; may be "
    "repeated; by default the setting gpunodes_prepare_gpus.",
)
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
@common.unsupported_os_option
def command(
    machines: tuple[str, ...],
    gpu_device: tuple[str, ...],
    flags: common.CommonOptions,
    requested: Mapping[str, Any],
) -> int:
    """Install what a join would install, without joining: for golden images.

    MACHINES are names, addresses, groups or patterns of the inventory. It needs no cluster and no control plane: the
    settings decide the versions. The kubelet stays off, and all images are pulled. A machine that is a node is refused.
    `gpunodes join` later changes little; `gpunodes reset` undoes everything.

    Before a disk becomes an image, remove what identifies its machine: /etc/machine-id and the SSH host keys
    (`cloud-init clean --logs --machine-id`, or virt-sysprep).
    """
    inventory = checked.inventory(flags.inventory, checked.Needs.MACHINES)
    given = {"gpunodes_prepare_gpus": list(gpu_device)} if gpu_device else {}
    flags = common.requesting(flags, {**requested, **given})
    code = common.execute(OPERATION, inventory, inventory.select(machines), flags)
    if code == ExitCode.DONE and not flags.options.dry_run:
        terminal.line(_REMAINING, err=True)
    return code


_REMAINING = (
    "for an image of the disk: remove /etc/machine-id and the SSH host keys (cloud-init clean, virt-sysprep), and shut "
    "the machine down"
)
