"""What the other side says of its operations, in our words, and what a set of such words comes to. No database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeAlias

from durable_core.arguments import clean_text
from durable_core.errors import DefinitionError
from durable_core.states import OperationState

MOST_IDS = 1000
LONGEST_ID = 500
LONGEST_WORD = 100


class ExternalStatus(StrEnum):
    """What became of one operation of the other side."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    CANCELED = "canceled"
    UNKNOWN = "unknown"
    """It said nothing of it, or a word that the kind's `statuses` does not have. It renews no patience."""


ENDED = frozenset({ExternalStatus.OK, ExternalStatus.FAILED, ExternalStatus.CANCELED})
"""From these none comes back, whatever a later answer says."""

Said = Mapping[str, "ExternalStatus | str"]
"""By the other side's id: one of our words, or the other side's own, which the kind's `statuses` translates."""


def seconds_asked(what: str, after: float | timedelta | None) -> float:
    """Seconds that a provider asked to wait. Raises ValueError."""
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    if seconds is None:
        return 0.0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 10**9:
        raise ValueError(f"{what}={after!r}: give seconds or a timedelta, not below 0")
    return float(seconds)


@dataclass(frozen=True)
class Issued:
    """What the call came to: the ids under which the other side is to be asked, and what it said of them already."""

    external_ids: Sequence[str] = field(repr=False)
    statuses: Said = field(default_factory=dict, repr=False)
    retry_after: float | timedelta | None = None
    """How long the provider asked to wait before the first poll."""

    def __post_init__(self) -> None:
        ids = self.external_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence) or len(ids) > MOST_IDS:
            raise ValueError(f"Issued(external_ids=...): give a list of at most {MOST_IDS} texts")
        for one in ids:
            if not isinstance(one, str) or not 0 < len(one) <= LONGEST_ID or not one.isprintable():
                raise ValueError(f"Issued(external_ids=...): an id is text of 1 to {LONGEST_ID} printable characters")
        if len(set(ids)) != len(ids):
            raise ValueError("Issued(external_ids=...): an id is there twice")
        if not isinstance(self.statuses, Mapping):
            raise ValueError("Issued(statuses=...): give a mapping of ids to statuses")
        seconds_asked("Issued(retry_after", self.retry_after)


@dataclass(frozen=True)
class Poll:
    """What a poll was answered: the statuses by id, and how long the provider asked to wait before the next."""

    statuses: Said = field(repr=False)
    retry_after: float | timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.statuses, Mapping):
            raise ValueError("Poll(statuses=...): give a mapping of ids to statuses")
        seconds_asked("Poll(retry_after", self.retry_after)


def checked_words(kind: str, statuses: Mapping[str, str] | None) -> dict[str, ExternalStatus]:
    """The kind's translation of the other side's words; without one, our own words stand for themselves."""
    ours = {status.value: status for status in ExternalStatus}
    if statuses is None:
        return ours
    if not isinstance(statuses, Mapping) or not statuses:
        raise DefinitionError(f"kind {kind!r}: statuses maps the other side's words to {', '.join(ours)}.")
    words = {}
    for word, status in statuses.items():
        if not isinstance(word, str) or status not in ours:
            raise DefinitionError(f"kind {kind!r}: statuses[{word!r}] is one of {', '.join(ours)}; got {status!r}.")
        words[word] = ours[status]
    return words


Kept: TypeAlias = dict[str, dict[str, str]]
"""By id: the status in our words, and the other side's own word."""


def read(words: Mapping[str, ExternalStatus], ids: Sequence[str], said: Said, before: Mapping[str, Any]) -> Kept:
    """
    The statuses to keep, by id, each with the other side's own word.

    An answer about another id is dropped, an id of which nothing was said is unknown, and what had ended before stays
    as it ended.
    """
    kept: Kept = {}
    for one in ids:
        was = before.get(one)
        if was is not None and was["status"] in ENDED:
            kept[one] = dict(was)
            continue
        given = said.get(one)
        if isinstance(given, ExternalStatus):
            status, word = given, given.value
        elif isinstance(given, str):
            status, word = words.get(given, ExternalStatus.UNKNOWN), clean_text(given, LONGEST_WORD)
        else:
            status, word = ExternalStatus.UNKNOWN, "" if given is None else type(given).__name__
        kept[one] = {"status": status.value, "word": word}
    return kept


@dataclass(frozen=True)
class Verdict:
    """Where these statuses take the operation, why, and whether the other side was heard: an unknown word is none."""

    state: OperationState
    heard: bool
    code: str | None = None
    message: str | None = None


def verdict(kept: Mapping[str, Mapping[str, str]]) -> Verdict:
    """All ok: it succeeded. One failed or was canceled: it failed. None at all: it failed, and says so."""
    found = [ExternalStatus(one["status"]) for one in kept.values()]
    if not found:
        return Verdict(OperationState.FAILED, True, "NO_OPERATIONS", "the other side began nothing that can be polled")
    if all(one is ExternalStatus.OK for one in found):
        return Verdict(OperationState.SUCCEEDED, True)
    for status, code in ((ExternalStatus.FAILED, "REMOTE_FAILED"), (ExternalStatus.CANCELED, "REMOTE_CANCELED")):
        if count := found.count(status):
            said = f"the other side says of {count} of {len(found)} that it {_ENDED_AS[status]}"
            return Verdict(OperationState.FAILED, True, code, said)
    return Verdict(OperationState.RUNNING, ExternalStatus.UNKNOWN not in found)


_ENDED_AS = {ExternalStatus.FAILED: "failed", ExternalStatus.CANCELED: "was canceled"}
