"""The machine is in its initial state: after check mode, and after a reset."""

from __future__ import annotations

import difflib

import pytest

testinfra_hosts = ["control-1", "gpu-1"]


def test_nothing_has_changed(bare: list[str], state: list[str]) -> None:
    changes = list(difflib.unified_diff(bare, state, "bare", "now", lineterm="", n=0))
    if changes:
        pytest.fail("\n".join(changes))  # not an assertion, which would shorten the output


def test_the_initial_state_contains_nothing_that_gpunodes_installs(bare: list[str]) -> None:
    # Otherwise the comparison would not show anything.
    installed = ("gpunodes", "containerd", "kubelet", "kubeadm", "/etc/kubernetes", "br_netfilter")
    assert [line for line in bare if any(name in line for name in installed)] == []
    assert "/swapfile" in bare
