"""Reads the manifests of kubeadm's static pods: their arguments and images. Machines' Python has no YAML parser."""

from __future__ import annotations

import re

from . import disk

FOLDER = "/etc/kubernetes/manifests"


def path(name: str) -> str:
    """The path of a component's manifest."""
    return f"{FOLDER}/{name}.yaml"


def argument(name: str, flag: str, text: str | None = None) -> str:
    """The value of ``--flag`` in a component's manifest, or in its ``text``; "" where it is not set."""
    text = disk.read(path(name)) if text is None else text
    found = re.search(rf"^\s*- [\"']?--{re.escape(flag)}=([^\s\"']+)", text or "", re.MULTILINE)
    return found.group(1) if found else ""


def image(name: str, text: str | None = None) -> str:
    """The image of a component, or of the ``text`` of its manifest; "" where there is none."""
    text = disk.read(path(name)) if text is None else text
    found = re.search(r"^\s*(?:- )?image: [\"']?([^\s\"']+)", text or "", re.MULTILINE)
    return found.group(1) if found else ""
