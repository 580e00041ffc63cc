"""What all walks of a session share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ansible builds each module once a session, not in each of the two hundred runs."""
    own = tmp_path_factory.getbasetemp()
    # Of all processes of pytest-xdist.
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared-modules"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSIBLE_CALLBACK_PLUGINS", str(Path(__file__).parent / "callback"))
        patch.setenv("GPUNODES_SHARED_MODULES", str(folder))
        yield
