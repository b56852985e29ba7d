"""`celery …` in a process of a test's: says by a file when the worker takes work, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from celery import signals
from celery.__main__ import main

LOOK_EVERY_SECONDS = 0.5


def run(ready: Path, arguments: list[str]) -> None:
    """Run Celery's own command line; at `worker_ready` make the file."""
    parent = os.getppid()

    def told(**_: object) -> None:
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
        ready.touch()

    signals.worker_ready.connect(told, weak=False)
    sys.argv = ["celery", *arguments]
    main()


def end_with(parent: int) -> None:
    """Kill the whole group once its parent is gone: a test run that was killed cleans nothing up."""
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
