"""The machines' BMCs: one Redfish emulator (sushy-tools) each, and the lab's own requests to them."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from enum import StrEnum
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.lab.layout import LabMachine, LabRecord, Layout

USER = "admin"
_START_LIMIT = 60
"""Seconds that an emulator gets to start."""


class LabPowerAction(StrEnum):
    """Power actions of a machine."""

    ON = "on"
    OFF = "off"
    CYCLE = "cycle"


# ResetType values of Redfish's ComputerSystem.Reset (DMTF DSP0268). A cycle is a real loss of power, not a reset.
_RESETS = {LabPowerAction.ON: ("On",), LabPowerAction.OFF: ("ForceOff",), LabPowerAction.CYCLE: ("ForceOff", "On")}


def url(record: LabRecord, machine: LabMachine) -> str:
    """The address of the machine's BMC."""
    return f"http://{record.gateway}:{machine.bmc_port}"


def configure(layout: Layout, record: LabRecord, machine: LabMachine) -> tuple[Path, Path]:
    """Write one emulator's settings; return its configuration file and its scratch folder.

    It has access to this machine only, as a real BMC (https://docs.openstack.org/sushy-tools, configuration file).
    """
    import bcrypt

    folder = layout.state / "bmc" / machine.name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = bcrypt.hashpw(machine.bmc_password.encode(), bcrypt.gensalt(rounds=4)).decode()
    users = folder / "htpasswd"
    users.write_text(f"{USER}:{password}\n")
    config = folder / "config.py"
    settings = {
        "SUSHY_EMULATOR_LISTEN_IP": record.gateway,
        "SUSHY_EMULATOR_LISTEN_PORT": machine.bmc_port,
        "SUSHY_EMULATOR_AUTH_FILE": str(users),
        "SUSHY_EMULATOR_LIBVIRT_URI": layout.libvirt_uri,
        "SUSHY_EMULATOR_ALLOWED_INSTANCES": [machine.uuid],
        "SUSHY_EMULATOR_STATE_DIR": str(folder),
        # The lab gives the machines' kernels to QEMU; a request for another boot device must not change that.
        "SUSHY_EMULATOR_IGNORE_BOOT_DEVICE": True,
    }
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    return config, folder


def power(record: LabRecord, machine: LabMachine, action: LabPowerAction) -> None:
    """Request a power action from the machine's BMC.

    Raises:
        GpunodesError: the BMC does not respond, or refuses the request.
    """
    for reset in _RESETS[action]:
        path = f"/redfish/v1/Systems/{machine.uuid}/Actions/ComputerSystem.Reset"
        _request(record, machine, path, {"ResetType": reset})


def _request(
    record: LabRecord, machine: LabMachine, path: str, body: dict[str, str] | None = None
) -> dict[str, object]:
    address = url(record, machine) + path
    token = base64.b64encode(f"{USER}:{machine.bmc_password}".encode()).decode()
    request = urllib.request.Request(  # noqa: S310 - the lab's own address
        address,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
    )
    # The user's proxy must not be used for the lab.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_LIMIT
    while True:
        try:
            with opener.open(request, timeout=_START_LIMIT) as answer:
                text = answer.read()
                return dict(json.loads(text)) if text else {}
        except urllib.error.HTTPError as error:
            raise GpunodesError(f"the BMC of {machine.name} refused ({error.code}): {error.read(300)!r}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise GpunodesError(
                    f"the BMC of {machine.name} does not respond at {address}: {error}",
                    remedy="`gpunodes lab up` repairs it",
                ) from error
            time.sleep(0.5)
