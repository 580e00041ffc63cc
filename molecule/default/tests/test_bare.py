"""The machine is as it was made: after check mode, and after a reset."""

from __future__ import annotations


def test_nothing_has_changed(bare: list[str], state: list[str]) -> None:
    assert state == bare


def test_nothing_of_ours_was_there_from_the_start(bare: list[str]) -> None:
    # Else the comparison would prove nothing.
    ours = ("gpunodes", "containerd", "kubelet", "kubeadm", "/etc/kubernetes", "br_netfilter")
    assert [line for line in bare if any(word in line for word in ours)] == []
    assert "/swapfile" in bare
