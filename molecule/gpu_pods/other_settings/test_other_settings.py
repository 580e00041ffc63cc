"""Other settings replace the labels and taints of earlier settings, and nothing else."""

from __future__ import annotations

from typing import Any

testinfra_hosts = ["control-1"]


def test_labels_are_replaced(node: dict[str, Any]) -> None:
    labels = node["metadata"]["labels"]
    assert labels["gpunodes.dev/pool"] == "spare"
    assert labels["gpunodes.dev/gpu"] == "true"
    assert labels["example.com/rack"] == "r1"
    assert "example.com/team" not in labels


def test_taints_are_removed(node: dict[str, Any]) -> None:
    assert [taint["key"] for taint in node["spec"]["taints"]] == ["example.com/quiet"]
