"""
Error text of the other side, as far as it may be kept: a class and a short sentence, without ids, tokens and bodies.

It errs on the side of leaving out. The whole text, with its traceback, is nowhere but in the exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from durable_core.arguments import clean_text
from durable_core.secrets import MASK, looks_secret

LONGEST = 300

_BODY = re.compile(r"[\[{<]|\bb['\"]")
"""Where a body begins that a library put behind its sentence: JSON, HTML, bytes."""
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)(?P<userinfo>[^/\s]*@)?(?P<host>[^/\s?#'\"]*)[^\s'\"]*", re.I)
_USER = re.compile(r"[^\s:]*:\S+@")
"""`user:password@` before a host, where no scheme says that it is a URL."""
_NAMED = re.compile(
    r"\b(?P<name>[\w\-]+)(?![\w\-])(?P<between>['\"]?\s*(?:[:=]|\bis\b)?\s*['\"]?)"
    r"(?P<value>(?<=\")[^\"]+|(?<=')[^']+|[^\s'\",;]+)"
)
_BEARER = re.compile(r"\b(bearer|basic|token)\s+\S+", re.I)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.~+/=]*")


def sanitised(said: str, ids: Iterable[str] = ()) -> str:
    """One line of at most 300 characters: of a URL the scheme and host, of a word with digits in it nothing."""
    text = next(iter(said.strip().splitlines()), "")[: LONGEST * 4]
    for one in sorted((one for one in ids if one), key=len, reverse=True):
        text = text.replace(one, MASK)
    urls: list[str] = []

    def keep_host(found: re.Match[str]) -> str:
        urls.append(found["scheme"] + _telling(found["host"]))
        return f"\0{len(urls) - 1}\0"

    text = _URL.sub(keep_host, text)
    text = _USER.sub(f"{MASK}@", text)
    text = _BODY.split(text, maxsplit=1)[0]
    text = _BEARER.sub(lambda found: f"{found[1]} {MASK}", text)
    text = _without_named(text)
    text = _WORD.sub(lambda found: found[0] if _tells_nothing(found[0]) else MASK, text)
    text = re.sub(r"\0(\d+)\0", lambda found: urls[int(found[1])], text)
    return clean_text(text.strip(" :,;-"), LONGEST)


def of_error(error: BaseException, ids: Iterable[str] = ()) -> str:
    """An exception's class and what may be kept of its text. Its text may raise, and a failure is still recorded."""
    try:
        said = str(error)
    except Exception:
        said = ""
    cleaned = sanitised(said, ids)
    name = type(error).__name__
    return f"{name}: {cleaned}" if cleaned else name


def _without_named(text: str) -> str:
    """Whatever follows the name of a secret is masked. What follows another word may be such a name itself."""
    kept, at = list[str](), 0
    while found := _NAMED.search(text, at):
        secret = looks_secret(found["name"])
        end = found.end() if secret else found.end("name")
        kept.append(text[at : found.start("value")] + MASK if secret else text[at:end])
        at = end
    return "".join(kept) + text[at:]


def _telling(host: str) -> str:
    """A host's name tells where; one that carries an id in its first label is cut to the rest."""
    labels = host.split(".")
    return ".".join(MASK if not _tells_nothing(label.split(":")[0]) else label for label in labels)


def _tells_nothing(word: str) -> bool:
    """Whether a word is no id and no token: letters alone and not too many, or a short number such as a status."""
    bare = word.strip("-_.~+/=")
    if bare.isdigit():
        return len(bare) <= 3
    return not any(c.isdigit() for c in bare) and all(len(part) <= 24 for part in re.split(r"[\-_./]", bare))
