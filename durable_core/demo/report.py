"""What the demo shows: progress while it runs, then a table and one sentence."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from durable_core.demo.plan import Played
from durable_core.demo.supplier import Restocked
from durable_core.demo.tally import Tally

EVERY = 5.0
"""Seconds between two lines of progress where there is no terminal."""

LINES = (
    ("accepted", "calls promised by committed orders", "orders"),
    ("sent", "deliveries sent", "rows"),
    ("failed", "given up", "rows"),
    ("dead", "dead after their budget", "rows"),
    ("lost", "lost", "orders, rows, sinks"),
    ("missing_calls", "promised calls no sink has", "orders, sinks"),
    ("phantoms", "deliveries or calls of rolled-back orders", "rows, sinks"),
    ("doubled_database_effects", "database effects doubled", "effects"),
    ("lost_database_effects", "database effects missing", "effects"),
    ("effects_apart_from_receipt", "effects apart from their receipt", "effects, rows"),
    ("doubled_external_calls", "external calls repeated (allowed, one key)", "sinks"),
    ("calls_with_another_key", "calls with another key", "sinks"),
    ("rescued", "deliveries rescued from lost workers", "journal"),
    ("retried", "attempts retried", "journal"),
    ("refused_stale_writes", "stale writes refused", "workers' logs"),
)


@dataclass(frozen=True)
class Outcome:
    """The tally, and what happened to bring it about."""

    tally: Tally
    faults: Mapping[str, int]
    seconds: float
    seed: int
    drained: bool
    plan: Played | None = None
    """None where the deliveries did not end: then it was not begun."""
    restocked: Restocked | None = None

    @property
    def kept(self) -> bool:
        return (
            self.drained and not self.tally.broken
            and (self.plan is None or self.plan.broken is None)
            and (self.restocked is None or self.restocked.kept)
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        """One sentence."""
        broken = self.tally.broken
        if broken:
            what = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in broken.items())
            return f"BROKEN: {what}. Repeat it with --seed {self.seed}."
        if self.plan is not None and self.plan.broken is not None:
            return f"BROKEN: {self.plan.broken}"
        if self.restocked is not None and not self.restocked.kept:
            return (
                f"BROKEN: the operation was issued {self.restocked.issued} times and ended {self.restocked.state}. "
                f"Repeat it with --seed {self.seed}."
            )
        if not self.drained:
            return f"NOT FINISHED in time, although nothing is lost. Repeat it with --seed {self.seed}."
        return (
            f"Nothing was lost: all {self.tally.accepted} promised calls arrived, and every database effect "
            f"happened exactly once, through {self._counted('kill', 's')}, {self._counted('freeze', 's')} "
            f"and {self._counted('flush', 'es')}."
        )

    def _counted(self, fault: str, plural: str) -> str:
        count = self.faults[fault + plural]
        return f"{count} {fault if count == 1 else fault + plural}"

    def as_json(self) -> str:
        figures: dict[str, Any] = {
            **self.tally.as_json(), **self.faults,
            "operation": None if self.restocked is None else self.restocked.as_json(),
            "seconds": round(self.seconds, 1), "seed": self.seed, "kept": self.kept, "verdict": self.verdict,
            "plan": None if self.plan is None else self.plan.says,
        }  # fmt: skip
        return json.dumps(figures)

    def show(self, console: Console) -> None:
        table = Table(title=f"{self.faults['orders']} orders in {self.seconds:.0f} s (seed {self.seed})")
        table.add_column("what")
        table.add_column("count", justify="right")
        table.add_column("counted from", style="dim")
        for name, says, source in LINES:
            count = getattr(self.tally, name)
            alarming = name in self.tally.broken
            table.add_row(says, str(count), source, style="bold red" if alarming else None)
        for name in ("rolled_back", "duplicates", "kills", "freezes", "flushes"):
            table.add_row(name.replace("_", " "), str(self.faults[name]), "what was done")
        if (restocked := self.restocked) is not None:
            ended = restocked.error_code or restocked.state
            table.add_row("the operation, through its supplier's death", ended, "row")
            table.add_row("times that the supplier was told to begin it", str(restocked.issued), "the supplier's book")
        console.print(table)
        for report in () if self.plan is None else (self.plan.failed, self.plan.compensated):
            if report is not None:
                console.print(report.text, markup=False, soft_wrap=True)
        for example in self.tally.examples:
            console.print(f"  {example}", style="red", markup=False)
        console.print(self.verdict, style="bold green" if self.kept else "bold red", markup=False, soft_wrap=True)


class Shown:
    """Progress on standard error: a bar on a terminal, else a line now and then. Safe to call from any thread."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._terminal = self._console.is_terminal
        self._lock = threading.Lock()
        self._total = total
        self._last = 0.0
        self._bar = Progress(
            TextColumn("[bold]deliveries sent"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console, transient=True, disable=not self._terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def tell(self, sentence: str) -> None:
        """One line about what just happened."""
        with self._lock:
            if self._terminal:
                self._bar.console.print(f"  {sentence}", style="dim", markup=False, highlight=False)
            else:
                print(f"demo: {sentence}", file=sys.stderr, flush=True)

    def sent(self, count: int) -> None:
        if self._terminal:
            self._bar.update(self._task, completed=count)
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self.tell(f"{count} of {self._total} deliveries sent")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
