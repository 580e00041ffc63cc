"""Views whose lines have names that the cluster chooses: no line of them is one that such a name wrote."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.model import printable_lines
from gpunodes.operations.remains import Remains
from gpunodes.views import registry, users

from tests.hostile import ATTACKS, is_plain

TEXT = "".join(ATTACKS)
PLACES = ("address", "user", "folder", "image", "problem")
FOUND: Any = SimpleNamespace(
    **dict.fromkeys(PLACES, TEXT),
    certificate_end=0.0,
    changed=[TEXT],
    logins=SimpleNamespace(namespaces=[TEXT], left=[TEXT]),
)
STATUS: Any = SimpleNamespace(
    **dict.fromkeys(PLACES, TEXT), certificate_end=0.0, logins=[SimpleNamespace(namespace=TEXT)]
)
PULLED: Any = SimpleNamespace(node=TEXT, digest=TEXT, problem=TEXT)
VIEWS: dict[str, Callable[[], str]] = {
    "a registry that was made": lambda: registry.started(FOUND, dry_run=False),
    "a registry": lambda: registry.status(STATUS),
    "a registry that was removed": lambda: registry.removed([TEXT], TEXT),
    "nodes that pulled": lambda: registry.pulled([PULLED]),
    "what a user left": lambda: users.remains("alice", [Remains(TEXT), Remains(TEXT, 1, 1, 1)]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_no_line_is_one_that_a_name_wrote(view: str) -> None:
    """The terminal replaces the other control characters: it cannot know which lines are the view's own."""
    assert is_plain(printable_lines(VIEWS[view]()))
