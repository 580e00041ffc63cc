"""The machine is as it was made: after check mode, and after a reset."""

from __future__ import annotations

import difflib

import pytest

testinfra_hosts = ["control-1", "gpu-1"]


def test_nothing_has_changed(bare: list[str], state: list[str]) -> None:
    changes = list(difflib.unified_diff(bare, state, "bare", "now", lineterm="", n=0))
    if changes:
        pytest.fail("\n".join(changes))  # in full, where an assertion would cut it short


def test_nothing_of_ours_was_there_from_the_start(bare: list[str]) -> None:
    # Else the comparison would prove nothing.
    ours = ("gpunodes", "containerd", "kubelet", "kubeadm", "/etc/kubernetes", "br_netfilter")
    assert [line for line in bare if any(word in line for word in ours)] == []
    assert "/swapfile" in bare
