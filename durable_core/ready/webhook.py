"""
`webhook.post`: one HTTP POST of JSON, made at least once.

The hole: an answer that is lost on its way makes the call again. Every call of one delivery
carries the same `Idempotency-Key`, `step.key`, and the same bytes, for the receiver to know it by.
Where it is signed, the time of the call and the signatures over it alone differ.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator

from durable_core.deliveries.declare import DeliveryKind, Step, delivery
from durable_core.deliveries.options import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE
from durable_core.errors import DefinitionError, GiveUp, Retry
from durable_core.ready import signatures, targets
from durable_core.ready.named import Named, found, known
from durable_core.ready.targets import PrivateTarget
from durable_core.retry import Backoff
from durable_core.secrets import looks_secret

KIND = "webhook.post"
KEY_HEADER = "Idempotency-Key"
LONGEST_URL = 2000
LONGEST_RETRY_AFTER = 3600.0
SHORTEST_RETRY_AFTER = 1.0
"""A receiver that says "at once" would have the whole budget spent within a second."""

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_OURS = {
    KEY_HEADER.lower(), "host", "content-length", "transfer-encoding", "connection", "accept-encoding",
    *(name.lower() for name in signatures.HEADERS),
}  # fmt: skip
_CREDENTIALS = {"cookie", "authorization", "proxy-authorization"}


def _checked_url(url: str) -> str:
    """An address that may be called. Raises ValueError, which never quotes the URL: its query may be a secret."""
    if not url.isprintable() or " " in url or len(url) > LONGEST_URL:
        raise ValueError(f"a URL has no blanks or control characters and at most {LONGEST_URL} letters")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("only http and https URLs with a host are called")
    if "@" in parts.netloc:
        raise ValueError("a URL with a user or password in it would be stored; send credentials in another way")
    if parts.port == 0:
        raise ValueError("port 0 is no port")
    return url


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _TOKEN.match(name):
            raise ValueError("a header's name has letters, digits and '-' only")
        if name.lower() in _OURS:
            raise ValueError(f"{name} is set by the delivery itself")
        if not value.isascii() or not value.replace("\t", " ").isprintable():
            raise ValueError(f"{name}: a header's value is one line of ASCII")
    return headers


def _without_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name in _checked_headers(headers):
        if name.lower() in _CREDENTIALS or looks_secret(name):
            raise ValueError(
                f"{name} holds a secret, and arguments are stored readable; "
                "keep it in Webhooks(headers={...}) and pass headers_from"
            )
    return headers


Url = Annotated[str, AfterValidator(_checked_url)]
Headers = Annotated[dict[str, str], AfterValidator(_without_secrets)]


@dataclass(frozen=True)
class Webhooks:
    """
    How receivers are called. Seconds to connect and for the whole call; bytes of an answer that are read.

    `private_targets=True` lets calls reach loopback and the networks behind it, for development;
    `allow=("10.1.0.0/16",)` some of them. `secrets` and `headers` are what a payload names by
    `sign_with` and `headers_from`: keys to sign with, the newest first, and headers that hold
    credentials; each may be a function, called at each attempt. `proxy` is used for every call
    when it is set; the proxy variables of the environment are not. None of these three is in a repr.

    The hole: a proxy resolves names itself. Addresses and localhost are judged here all the
    same; what a name means to the proxy, its own rules must judge.
    """

    connect_timeout: float = 5.0
    total_timeout: float = 15.0
    answer_bytes: int = 64 * 1024
    proxy: str | None = field(default=None, repr=False)
    private_targets: bool = False
    allow: Sequence[str] = ()
    secrets: Named[str | Sequence[str]] = field(default_factory=dict, repr=False)
    headers: Named[Mapping[str, str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.connect_timeout <= self.total_timeout or self.answer_bytes < 0:
            raise DefinitionError("Webhooks needs 0 < connect_timeout <= total_timeout and answer_bytes >= 0.")
        try:
            if isinstance(self.allow, str):
                raise ValueError("it is a tuple of networks")
            targets.networks(self.allow)
        except ValueError as refused:
            raise DefinitionError(f"Webhooks: allow holds networks such as 10.1.0.0/16: {refused}.") from None
        for name, keys in {} if callable(self.secrets) else self.secrets.items():
            if (problem := signatures.problem_of(keys)) is not None:
                raise DefinitionError(f"Webhooks: the secret {name!r} cannot sign: {problem}.")
        for name, headers in {} if callable(self.headers) else self.headers.items():
            try:
                _checked_headers(dict(headers))
            except ValueError as refused:
                raise DefinitionError(f"Webhooks: the headers {name!r} cannot be sent: {refused}.") from None


def declare(
    settings: Webhooks | Callable[[], Webhooks] | None = None,
    *,
    name: str = KIND,
    queue: str = DEFAULT_QUEUE,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Backoff | None = None,
    timeout: float = 60.0,
) -> DeliveryKind[..., dict[str, Any]]:
    """
    Declare the kind `webhook.post`: `url`, `body` (JSON), `headers`, `sign_with`, `headers_from`.

    `settings` may be a function, called at each attempt. Arguments are stored in the row, readable
    by whoever reads the table: no secrets in them, but the names that Webhooks has for them. A
    name that it does not hold is refused at enqueue, or gives up with `UNKNOWN_SECRET` or
    `UNKNOWN_HEADERS` where only the worker can tell. See `post` for what becomes of each answer.
    """
    webhooks = Webhooks() if settings is None else settings

    def post_webhook(
        step: Step,
        url: Url,
        body: Any,
        headers: Headers | None = None,
        sign_with: str | None = None,
        headers_from: str | None = None,
    ) -> dict[str, Any]:
        now = webhooks if isinstance(webhooks, Webhooks) else webhooks()
        return post(now, step, url=url, body=body, headers=headers, sign_with=sign_with, headers_from=headers_from)

    if isinstance(webhooks, Webhooks):
        # Types of this very declaration, which no annotation in the source could name.
        post_webhook.__annotations__["sign_with"] = Annotated[str, known(webhooks.secrets, "secret")] | None
        post_webhook.__annotations__["headers_from"] = Annotated[str, known(webhooks.headers, "headers")] | None
    return delivery(name, queue=queue, max_attempts=max_attempts, backoff=backoff, timeout=timeout)(post_webhook)


def post(
    webhooks: Webhooks,
    step: Step,
    *,
    url: str,
    body: Any,
    headers: Mapping[str, str] | None = None,
    sign_with: str | None = None,
    headers_from: str | None = None,
) -> dict[str, Any]:
    """
    Make the call from inside a handler; `{"status": ...}` once the receiver said 2xx.

    429 and 5xx raise Retry, at the time that `Retry-After` names, an hour at most; so do
    timeouts and network errors. Anything else, redirects too, raises GiveUp: `HTTP_404`; so
    does a host with an address that is not public, `PRIVATE_TARGET`. The connection goes to an
    address that was judged, whatever the name means a moment later.

    Here `headers` may hold what the handler took from its settings; in an argument they may not.
    """
    try:
        _checked_url(url)
        host = httpx.URL(url).raw_host.decode("ascii")
        extra = {**_checked_headers(dict(headers or {})), **_from_settings(webhooks, headers_from)}
    except (ValueError, httpx.InvalidURL) as refused:
        raise GiveUp(str(refused), code="BAD_REQUEST") from None
    content = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    sent = httpx.Headers({"Content-Type": "application/json", "User-Agent": "durable-core"})
    sent.update(extra)
    # The answer is read as it comes: what would have to be unpacked could unpack to anything.
    sent.update({KEY_HEADER: step.key, "Accept-Encoding": "identity"})
    if sign_with is not None:
        sent.update(_signed(webhooks, step, sign_with, content.decode()))
    deadline = _Deadline(webhooks.total_timeout)
    try:
        with _client(webhooks) as client, deadline:
            response = _sent(client, webhooks, deadline, url, content, sent)
            try:
                said = _excerpt(response, webhooks.answer_bytes)
            finally:
                response.close()
    except PrivateTarget as private:
        raise GiveUp(str(private), code="PRIVATE_TARGET") from None
    except (httpx.InvalidURL, UnicodeError):
        raise GiveUp("this is no URL", code="BAD_REQUEST") from None
    except (httpx.HTTPError, OSError) as broken:
        if deadline.over or isinstance(broken, httpx.TimeoutException | TimeoutError):
            raise Retry(f"{host} did not answer in time", code="HTTP_TIMEOUT") from None
        raise Retry(f"{host}: {type(broken).__name__}: {broken}", code="NETWORK") from None
    return _verdict(response, f"{host}: {response.status_code} {said}".strip())


def _from_settings(webhooks: Webhooks, name: str | None) -> Mapping[str, str]:
    if name is None:
        return {}
    headers = found(webhooks.headers, name)
    if headers is None:
        raise GiveUp(f"the settings have no headers named {name!r}", code="UNKNOWN_HEADERS")
    return _checked_headers(dict(headers))


def _signed(webhooks: Webhooks, step: Step, name: str, content: str) -> Mapping[str, str]:
    keys = found(webhooks.secrets, name)
    if keys is None:
        raise GiveUp(f"the settings have no secret named {name!r}", code="UNKNOWN_SECRET")
    if (problem := signatures.problem_of(keys)) is not None:
        raise GiveUp(f"the secret {name!r} cannot sign: {problem}", code="BAD_SECRET")
    return signatures.headers(keys, step.key, content)


def _sent(
    client: httpx.Client, webhooks: Webhooks, deadline: _Deadline, url: str, content: bytes, headers: httpx.Headers
) -> httpx.Response:
    """The answer, its body unread, from the first address of the host that takes the connection."""
    asked = httpx.URL(url)
    host = asked.raw_host.decode("ascii")
    allowed = targets.networks(webhooks.allow)
    places = [asked]
    if webhooks.proxy is None:
        port = asked.port or (443 if asked.scheme == "https" else 80)
        addresses = targets.judged(
            host, port, seconds=deadline.left, anywhere=webhooks.private_targets, allowed=allowed
        )
        places = [asked.copy_with(host=address) for address in addresses]
    elif not webhooks.private_targets:
        targets.check_literal(host, allowed=allowed)
    headers["Host"] = asked.netloc.decode("ascii")
    for place in places:
        left = max(deadline.left, 0.001)
        request = client.build_request(
            "POST", place, content=content, headers=headers,
            timeout=httpx.Timeout(left, connect=min(webhooks.connect_timeout, left)),
            # The certificate is the name's, not the address's.
            extensions={"trace": deadline.watch, "sni_hostname": host},
        )  # fmt: skip
        try:
            return client.send(request, stream=True, follow_redirects=False)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            # Nothing was said to that address yet, so the next one may be asked.
            if place is places[-1] or deadline.over:
                raise
    raise OSError(f"{host} has no address")


def _verdict(response: httpx.Response, sentence: str) -> dict[str, Any]:
    status = response.status_code
    if 200 <= status < 300:
        return {"status": status}
    code = f"HTTP_{status}"
    if status == 429 or 500 <= status < 600:
        raise Retry(sentence, after=retry_after(response.headers), code=code)
    raise GiveUp(sentence, code=code)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """
    Seconds to wait as `Retry-After` says, 1 s to an hour; None leaves it to the kind's back-off.

    A date is compared with the answer's own `Date`. Without one it says nothing: only a
    clock of ours could read it, and those do not matter.
    """
    asked = headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        seconds = float(asked[:10])
    else:
        try:
            then = parsedate_to_datetime(asked)
            now = parsedate_to_datetime(headers["date"])
            seconds = (_aware(then) - _aware(now)).total_seconds()
        except (KeyError, ValueError, TypeError, IndexError, OverflowError):
            return None
    return min(max(seconds, SHORTEST_RETRY_AFTER), LONGEST_RETRY_AFTER)


def _aware(instant: datetime) -> datetime:
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


def _excerpt(response: httpx.Response, most: int) -> str:
    """The beginning of the answer, for the error text. The status has been heard: a broken body changes nothing."""
    heard = bytearray()
    try:
        for chunk in response.iter_raw():
            heard += chunk
            if len(heard) >= most:
                break
    except (httpx.HTTPError, OSError):
        pass  # the answer is its status; the rest is for people
    return bytes(heard[: min(most, 500)]).decode(errors="replace")


@lru_cache(maxsize=1)
def _trust() -> ssl.SSLContext:
    # Reading the certificates takes longer than most calls.
    return httpx.create_ssl_context()


@contextmanager
def _client(webhooks: Webhooks) -> Iterator[httpx.Client]:
    """One client a call: no socket outlives a fork, and no cookie is carried to another receiver."""
    with httpx.Client(verify=_trust(), proxy=webhooks.proxy, trust_env=False) as client:
        yield client


class _Deadline:
    """
    Ends a call when its time is over, however slowly the answer drips.

    The client's own timeouts run anew with each byte; so the socket is shut from outside.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._shut)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left <= 0

    def watch(self, event: str, facts: Mapping[str, Any]) -> None:
        """Learn the socket from the client's trace."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = facts["return_value"].get_extra_info("socket")
            if self.over:
                self._shut()

    def _shut(self) -> None:
        with self._lock:
            if self._socket is not None:
                try:
                    # Past a TLS socket's own method, which would forget its cipher in the middle of a read.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # it was closed already

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
