"""The fixtures of the end-to-end tests, for tests that take hours."""

from tests.machines.conftest import labs, operator

__all__ = ["labs", "operator"]
