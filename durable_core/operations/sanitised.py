"""
Error text of the other side, as far as it may be kept: a class and a short sentence, without ids, tokens and bodies.

It errs on the side of leaving out. The whole text, with its traceback, is nowhere but in the exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

from durable_core.arguments import clean_text
from durable_core.operations.statuses import LONGEST_ID
from durable_core.secrets import MASK, looks_secret

LONGEST = 300
SHORT = 12
"""Of a word that is joined to others no part is longer."""
READ = 4000
"""More of an error's text is not looked at."""

_BODY = re.compile(r"[\[{<]|\bb['\"]")
"""Where a body begins that a library put behind its sentence: JSON, HTML, bytes."""
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)(?P<userinfo>[^/\s]*@)?(?P<host>[^/\s?#'\"]*)[^\s'\"]*", re.I)
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}(:\d+)?")
_USER = re.compile(r"[^\s:]*:\S+@")
"""`user:password@` before a host, where no scheme says that it is a URL."""
_NAMED = re.compile(
    r"\b(?P<name>[\w\-]+)(?![\w\-])(?P<between>['\"]?\s*(?:[:=]|\bis\b)?\s*['\"]?)"
    r"(?P<value>(?<=\")[^\"]+|(?<=')[^']+|[^\s'\",;]+)"
)
_EQUALS = re.compile(r"(?P<name>[\w\-.]+['\"]?\s?=\s?)(?:\"[^\"]*\"?|'[^']*'?|[^\s'\",;]+)")
"""`name=value`: the name is the code's, the value is the other side's."""
_CALLED = re.compile(
    r"\b(?P<name>(?:\w[\w\-]*[_\-])?(?i:key|token|secret|operation|id)(?i:s)?|\w*[a-z](?:Key|Token|Secret|Operation|Id|ID)s?)"
    r"(?P<between>[\s:=#'\"(]+(?:(?:is|was)\s+['\"]?)?)"
    r"(?!(?i:api|key|token|secret|operation|id)(?i:s)?(?![\w\-]))(?P<value>\w[\w\-.~+/=]*)"
)
"""A word that an id or a token follows: `operation oak`, `api key: oak`."""
_SAID_OF_IT = re.compile(
    r"(?:a|aborted|allowed|already|and|any|are|as|at|be|been|busy|but|by|can|canceled|cancelled|"
    r"cannot|changed|closed|code|completed|conflict|could|denied|did|disabled|do|does|error|exists|"
    r"expired|failed|finished|for|found|from|gone|had|has|have|in|incorrect|invalid|is|it|its|"
    r"known|limit|locked|mismatch|missing|must|no|none|not|of|on|or|permitted|rejected|required|"
    r"refused|reused|revoked|running|should|status|still|stopped|that|the|this|timed|timeout|to|too|"
    r"unavailable|unknown|unsupported|used|was|when|which|with|without|wrong|you|your)"
    r"[.\-]*",
    re.I,
)
"""What may follow such a word, and is neither."""
_BEARER = re.compile(r"\b(bearer|basic|token)\s+\S+", re.I)
_WORD = re.compile(r"[^\W_][\w\-.~+/=]*")
_SECONDS = re.compile(r"(?<![\w.\-])\d{1,6}(?:\.\d{1,6})?\s?(?:ms|s|sec|secs|seconds?|min|minutes?|hours?)\b")
_SAID = re.compile(
    r"\b(?:https?(?:/[\d.]{1,3})?|status|code|error|said|answered|returned|with)(?:\s(?:status|code|error))?:?\s[1-5]\d\d(?![\w.\-])",
    re.I,
)
_NUMBER = re.compile(r"(?<![\w.\-])([1-5]\d\d)(?=[\s:,]+([a-z]+))", re.I)
_ASIDE = 0xF0000
"""From here on characters are nobody's: each stands for what is set aside meanwhile. No text that is read has one."""
_CODE = re.compile(r"HTTP_[1-5]\d\d|[A-Z]{1,24}(?:[_\-.][A-Z]{1,24}){0,3}")


def sanitised(said: str, ids: Iterable[str] = ()) -> str:
    """
    One line of at most 300 characters: of a URL the host, of what is called by a name or has a digit in it nothing.

    Nor of a word that follows `key` or `operation`, and of one that is not written as words are. The hole: an id or a
    token of letters alone that looks like a word, and follows none of these, stays. So do a status of HTTP and a
    duration. `ids` are left out as whole words, and wherever they stand if they are no mere letters.
    """
    text = clean_text(said[:READ].strip(), READ)
    text = _without(next(iter(text.splitlines()), ""), ids)
    if len(said) > READ:
        text = text[:-LONGEST_ID]  # one that was cut in two is no longer known
    text = _cut(text, 4 * LONGEST)
    kept: list[str] = []

    def keep(words: str) -> str:
        kept.append(words)
        return chr(_ASIDE + len(kept) - 1)

    text = _URL.sub(lambda found: keep(found["scheme"] + _telling(found["host"])), text)
    text = _USER.sub(f"{MASK}@", text)
    text = _BODY.split(text, maxsplit=1)[0]
    text = _BEARER.sub(lambda found: f"{found[1]} {MASK}", text)
    text = _without_named(text)
    text = _EQUALS.sub(lambda found: f"{found['name']}{MASK}", text)
    text = _CALLED.sub(_without_what_follows, text)
    for measure in (_SECONDS, _SAID):
        text = measure.sub(lambda found: keep(found[0]), text)
    text = _NUMBER.sub(lambda found: keep(found[1]) if _is_status(found[1], found[2]) else found[1], text)
    text = _WORD.sub(lambda found: found[0] if _is_plain(found[0]) else MASK, text)
    return _cut("".join(kept[ord(c) - _ASIDE] if ord(c) >= _ASIDE else c for c in text).strip(" :,;-"))


def of_error(error: BaseException, ids: Iterable[str] = ()) -> str:
    """An exception's class and what may be kept of its text. Its text may raise, and a failure is still recorded."""
    try:
        said = str(error)
    except Exception:
        said = ""
    cleaned = sanitised(said, ids)
    name = type(error).__name__
    return _cut(f"{name}: {cleaned}" if cleaned else name)


def code_of(code: str, otherwise: str) -> str:
    """A code that a handler named, where it is words of upper-case letters or a status of HTTP: others may be ids."""
    return code if _CODE.fullmatch(code) else otherwise


def _without(text: str, ids: Iterable[str]) -> str:
    known = sorted({one for one in ids if one}, key=len, reverse=True)
    if not known:
        return text
    # An id of letters alone may be a part of any word.
    each = (rf"(?<!\w){re.escape(one)}(?!\w)" if one.isalpha() else re.escape(one) for one in known)
    return re.sub("|".join(each), MASK, text, flags=re.I)


def _without_named(text: str) -> str:
    """Whatever follows the name of a secret is masked. What follows another word may be such a name itself."""
    kept, at = list[str](), 0
    while found := _NAMED.search(text, at):
        secret = looks_secret(found["name"])
        end = found.end() if secret else found.end("name")
        kept.append(text[at : found.start("value")] + MASK if secret else text[at:end])
        at = end
    return "".join(kept) + text[at:]


def _without_what_follows(found: re.Match[str]) -> str:
    return found[0] if _SAID_OF_IT.fullmatch(found["value"]) else f"{found['name']}{found['between']}{MASK}"


def _telling(host: str) -> str:
    """A host's name tells where; one that carries an id in a label is cut to the rest."""
    if _ADDRESS.fullmatch(host):
        return host
    name, colon, port = host.partition(":")
    return ".".join(label if _tells_nothing(label) else MASK for label in name.split(".")) + colon + port


def _is_status(number: str, word: str) -> bool:
    """Whether a number stands before what HTTP calls it: `404 Not Found`, `500 Server Error`."""
    try:
        phrase = HTTPStatus(int(number)).phrase
    except ValueError:
        phrase = ""
    return word.lower() in (phrase.partition(" ")[0].lower(), "client", "server")


def _tells_nothing(word: str) -> bool:
    """Whether a word is no id and no token: letters alone, and not too many."""
    return not any(c.isdigit() for c in word) and all(len(part) <= 24 for part in re.split(r"[\-_./~+=]", word))


def _is_plain(word: str) -> bool:
    """Whether it may stand in a sentence: written as words are, and of joined ones two or three short ones."""
    parts = [part for part in re.split(r"[\-_./~+=]", word) if part]
    joined = [part for part in re.split(r"[\-_]", word) if part]
    return (
        _tells_nothing(word)
        and all(part in (part.lower(), part.upper(), part.capitalize()) for part in parts)
        and (len(joined) < 2 or (len(joined) <= 3 and all(len(part) <= SHORT for part in joined)))
    )


def _cut(text: str, longest: int = LONGEST) -> str:
    """The first so many characters, up to a space: half a word may be another one."""
    return text if len(text) <= longest else text[: longest + 1].rpartition(" ")[0]
