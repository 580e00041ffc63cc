"""The end-to-end tests' operator, for tests that take hours."""

from tests.machines.conftest import labs, operator

__all__ = ["labs", "operator"]
