"""What Flower heard of a hint, as people read it: the kind, the id and the attempt; and how it ended."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from durable_core.deliveries.read import checked_id
from durable_core.errors import NotFound

LONGEST_REPR = 1000
"""Characters of a task's kwargs that are looked at; a hint's are about 200."""

_ENDED = re.compile(r"(?:DeliveryEnded|DeliveryRetried)\((.*)\)\Z", re.DOTALL)


@dataclass(frozen=True)
class Hint:
    """The delivery that a task was a hint of."""

    kind: str
    id: str
    attempt: int


def hint_of(task: Any) -> Hint | None:
    """What this task hinted at; None for a task that is no hint of ours. Its event is not believed, but read."""
    shown = _literal(getattr(task, "kwargs", None))
    if not isinstance(shown, dict) or set(shown) != {"kind", "id", "attempt"} or shown["kind"] != task.name:
        return None
    attempt = shown["attempt"]
    if type(attempt) is not int or not isinstance(shown["id"], str):
        return None
    try:
        return Hint(task.name, checked_id(shown["id"]), attempt)
    except NotFound:
        return None


def format_task(task: Any) -> Any:
    """
    Flower's option of this name. A hint says which delivery, which attempt, and in a word how it ended.

    Other tasks stay as they are. The hole: this is what pages show; `/api/tasks` has what the event said, which of a
    hint is the same.
    """
    hint = hint_of(task)
    if hint is None:
        return task
    task.args = ""
    # The attempt first: a narrow column cuts the end.
    task.kwargs = f"attempt {hint.attempt} of {hint.kind} {hint.id}"
    if task.state in ("RETRY", "FAILURE"):
        # Ours says it in words; Celery's own (a lost worker, a kind that is not known) by its name.
        ended = _ENDED.match(task.exception or "")
        task.result = _literal(ended[1]) if ended else task.exception
    elif isinstance(said := _literal(task.result), str):
        task.result = said
    return task


def _literal(text: object) -> object:
    """The Python value that a repr was made of; None where it is none, or too long to be one of ours."""
    if not isinstance(text, str) or len(text) > LONGEST_REPR:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
