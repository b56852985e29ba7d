"""Fixtures of operations."""

from tests.operations import declare_operation, look, operation_row, remote, reset, start  # noqa: F401  (fixtures)
