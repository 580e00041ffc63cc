"""The end-to-end tests' operator, for tests that take hours."""

from tests.machines.conftest import operator

__all__ = ["operator"]
