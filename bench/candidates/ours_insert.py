"""Deliveries whose handler inserts its effect by `step.session`, so that it commits with the receipt."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from bench.candidates import ours
from bench.candidates.ours import app

__all__ = ["app", "send_all", "sender"]


def sender(url: str) -> AbstractContextManager[Callable[[int], object]]:
    return ours.sender(url, ours.note_and_insert)


def send_all(url: str, numbers: Iterable[int]) -> None:
    ours.send_all(url, numbers, ours.note_and_insert)
