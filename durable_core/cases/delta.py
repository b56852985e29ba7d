"""
What a commit changed, as a JSON Patch of one order (RFC 6902, with `add`, `remove` and `replace` alone).

It names the deepest places that differ: of an object what is removed or changed in the order of the old keys, then what
is new in the order of the new ones; of a list each place for itself, then what is behind the end of the shorter one.
True and 1 differ, and so do 1 and 1.0. Where nothing changed it is empty.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class BadPatch(ValueError):
    """A patch does not fit the document that it is applied to."""


def delta(old: Any, new: Any) -> list[dict[str, Any]]:
    """The patch that makes `new` of `old`, both strict JSON. It shares no part with either."""
    return list(_changes(old, new, ""))


def _changes(old: Any, new: Any, at: str) -> Iterator[dict[str, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key in new:
                yield from _changes(value, new[key], f"{at}/{_escaped(key)}")
            else:
                yield {"op": "remove", "path": f"{at}/{_escaped(key)}"}
        for key, value in new.items():
            if key not in old:
                yield {"op": "add", "path": f"{at}/{_escaped(key)}", "value": copy.deepcopy(value)}
    elif isinstance(old, list) and isinstance(new, list):
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from _changes(before, after, f"{at}/{index}")
        for value in new[len(old) :]:
            yield {"op": "add", "path": f"{at}/-", "value": copy.deepcopy(value)}
        # From the end, so that no removal moves a place that is named after it.
        for index in range(len(old) - 1, len(new) - 1, -1):
            yield {"op": "remove", "path": f"{at}/{index}"}
    elif type(old) is not type(new) or old != new:
        yield {"op": "replace", "path": at, "value": copy.deepcopy(new)}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def applied(old: Any, patch: Sequence[Mapping[str, Any]]) -> Any:
    """The document that this patch makes of `old`, which stays as it is. Raises BadPatch."""
    document = copy.deepcopy(old)
    for change in patch:
        try:
            document = _with(document, change)
        except (KeyError, IndexError, TypeError, ValueError) as unfit:
            raise BadPatch(f"{change.get('op')} {change.get('path')!r} does not fit the document") from unfit
    return document


def _with(document: Any, change: Mapping[str, Any]) -> Any:
    act, path = change["op"], change["path"]
    if act not in ("add", "remove", "replace"):
        raise ValueError(f"no operation of ours: {act!r}")
    value = None if act == "remove" else copy.deepcopy(change["value"])
    if path == "":
        if act == "remove":
            raise ValueError("the whole document cannot be removed")
        return value
    empty, *parts = path.split("/")
    if empty:
        raise ValueError("a path begins with a slash")
    *parents, last = (_unescaped(part) for part in parts)
    place = document
    for part in parents:
        place = place[_index(part, len(place))] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        if act == "add":
            place.insert(len(place) if last == "-" else _index(last, len(place) + 1), value)
        elif act == "remove":
            del place[_index(last, len(place))]
        else:
            place[_index(last, len(place))] = value
    elif act == "add":
        place[last] = value
    elif act == "remove":
        del place[last]
    elif last in place:
        place[last] = value
    else:
        raise KeyError(last)
    return document


def _index(part: str, length: int) -> int:
    if not part.isascii() or not part.isdigit() or (part != "0" and part.startswith("0")):
        raise ValueError(f"{part!r} is no place of a list")
    if int(part) >= length:
        raise IndexError(part)
    return int(part)
