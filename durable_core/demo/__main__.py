"""`python -m durable_core.demo`: the demo without the command line of the package."""

import argparse
import sys
from pathlib import Path

from durable_core.demo import run


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m durable_core.demo", description=run.main.__doc__)
    parser.add_argument("--orders", type=int, default=run.ORDERS)
    parser.add_argument("--kills", type=int, default=run.KILLS)
    parser.add_argument("--freezes", type=int, default=run.FREEZES)
    parser.add_argument("--flushes", type=int, default=run.FLUSHES)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--directory", type=Path, default=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run.main(**vars(parsed())))
