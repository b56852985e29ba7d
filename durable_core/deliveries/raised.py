"""What came out of a handler, told for the row: the exception, what it was raised from, and what never ran."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from or after."""
    chain = [error]
    seen = {id(error)}
    for one in chain:
        yield one
        for other in (one.__cause__, one.__context__):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                chain.append(other)


LONGEST_SAID = 8192
"""Characters of an exception's own text; with the traceback it is cut once more."""


def told(error: BaseException) -> str:
    """The exception in one line, then its traceback."""
    # Not str(error): an exception's own text may raise, and a failure must still be recorded.
    story = traceback.TracebackException.from_exception(error)
    chain = [story]
    for one in chain:
        # 50 MB of it would be copied a dozen times before it is cut, and no heartbeat goes out meanwhile.
        vars(one)["_str"] = str(one)[:LONGEST_SAID]
        chain += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    traced = "".join(story.format())
    story.__notes__ = None  # they come last, where the exception itself is looked for
    return f"{list(story.format_exception_only())[-1]}\n{traced}"


def refuse_unrun(value: object) -> None:
    """A coroutine or generator that a handler hands back has not run: its work must not count as done."""
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()
        raise TypeError(f"the handler returned a {type(value).__name__} that never ran; declare it `async def`")
