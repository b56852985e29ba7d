"""What this very process is: a worker in the same container, or on the same machine, is most often the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

from durable_core.doctor.findings import Check, Finding, Reason, found, or_well

ROOM = "process"


def checks() -> list[Check]:
    return [Check("root", ROOM, root)]


def root() -> list[Finding]:
    """Whether whoever breaks into a handler owns the machine."""
    return or_well(_root(), "root", "it runs as a user of its own")


def _root() -> Iterator[Finding]:
    if getattr(os, "geteuid", lambda: -1)() == 0:
        yield found(
            "root", Reason.RUNS_AS_ROOT, "this runs as root",
            "run workers as a user of their own: USER in the Dockerfile, User= in the unit",
        )  # fmt: skip
    if os.environ.get("C_FORCE_ROOT"):
        yield found(
            "root", Reason.C_FORCE_ROOT, "C_FORCE_ROOT lets Celery unpickle, as root, what the broker says",
            "unset C_FORCE_ROOT",
        )  # fmt: skip
