"""
`python -m durable_core.probe` is `durable probe`, and quick where it can be: a container asks every ten seconds.

`--live` reads a file, and needs nothing but the standard library for it. Everything else is left to the command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from durable_core import pulse

OK, UNHEALTHY = 0, 6


def live(worker: str | None) -> tuple[bool, str, dict[str, Any]]:
    """Whether the worker, or every worker with a pulse here, is to be left alone; in a sentence, and for programs."""
    reads = pulse.judged(worker)
    ok = all(read.live for read in reads)
    says = "; ".join(said(read) for read in reads)
    return ok, f"{'live' if ok else 'not live'}: {says}", {"ok": ok, "asked": "live", "workers": as_json(reads)}


def said(read: pulse.Read) -> str:
    return f"{read.says} [{read.verdict}]"


def as_json(reads: Sequence[pulse.Read]) -> list[dict[str, Any]]:
    return [asdict(read) | {"consuming": read.consuming} for read in reads]


def main(line: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if line is None else line)
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--worker")
    parser.add_argument("--json", action="store_true")
    try:
        # What it does not know, the command does.
        given, more = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        given, more = argparse.Namespace(live=False), arguments
    if more or not given.live:
        from durable_core.cli.main import main as command

        command(["probe", *arguments])
    ok, says, answer = live(given.worker)
    print(json.dumps(answer) if given.json else says)
    return OK if ok else UNHEALTHY


if __name__ == "__main__":
    sys.exit(main())
