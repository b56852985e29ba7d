"""
A collection of documents over HTTP: a router for Starlette, and so for whatever mounts ASGI.

It reads, saves and restores. Documents are created and deleted by the host's own code, which knows whose they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from limits.storage import Storage
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from durable_core.document_refusals import VersionConflict
from durable_core.documents import openapi, static, wire
from durable_core.documents.declare import MOST_BYTES, Documents
from durable_core.documents.problems import TYPES, Problem
from durable_core.documents.read import checked_id
from durable_core.documents.refused import conflict, instant, problem_of
from durable_core.documents.rows import Saved
from durable_core.documents.transactions import Sessions, Transactions
from durable_core.documents.wire import Change
from durable_core.documents.writes import MOST_WRITES, Writes
from durable_core.errors import DefinitionError

MOST_BODY = MOST_BYTES + 4096
"""Content at its largest, and what stands around it."""
WRITING = {"POST", "PUT"}
COMMON = {"Cache-Control": "private, no-cache", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class User:
    """
    Who asks, and what they may: the answer of the hook.

    `name` stands in the history and is what writes are counted by. `owner`: only documents of this owner exist for
    them; `sees_all=True` instead of it: every document of the collection. `source="ai"` for a program that writes in a
    person's name. Raises DefinitionError for neither or both: an account of the host's whose team is missing is
    nobody's operator.
    """

    name: str
    owner: str | None = None
    may_save: bool = True
    source: Literal["user", "ai"] = "user"
    sees_all: bool = False

    def __post_init__(self) -> None:
        if self.sees_all is not (self.owner is None):
            raise DefinitionError(
                f"documents: a User has an owner, or sees_all=True; got owner={self.owner!r} and "
                f"sees_all={self.sees_all!r}."
            )


Hook: TypeAlias = "Callable[[Request], User | str | Awaitable[User | str | None] | None]"
"""Says who asks. Text is a user who sees their own documents alone; None, and empty text, is nobody, and 401.
`HTTPException` of Starlette, so FastAPI's too, says any other no. A function that is not async runs in a thread."""

Act: TypeAlias = "Callable[[Request, User], Awaitable[Response]]"


def router(
    documents: Documents,
    sessionmaker: Sessions,
    *,
    user: Hook,
    writes: str | None = MOST_WRITES,
    storage: Storage | None = None,
    trusted_origins: Iterable[str] = (),
    max_body: int = MOST_BODY,
    problem_types: str = TYPES,
) -> DocumentsRouter:
    """
    The collection over HTTP, to be mounted where it should be found.

    Each request has a transaction of its own, which is committed before the answer is sent. `user` says who asks.
    `writes` is how often one user may write, a rate of the library `limits`, None for as often as they like, and
    `storage` where that is counted: without one each process counts for itself. Writes from pages of other sites are
    refused but for `trusted_origins`, such as `https://app.example.com`; nothing here opens CORS. Bodies over
    `max_body` bytes, as they are sent, are refused before they are parsed.

    Raises DefinitionError for `writes` that is no rate, and for what is no origin.
    """
    counted = None if writes is None else Writes(documents.name, writes, storage)
    trusted = wire.origins(documents.name, trusted_origins)
    return DocumentsRouter(documents, Door(user, counted, trusted, problem_types), Transactions(sessionmaker), max_body)


@dataclass(frozen=True)
class Door:
    """What stands before every act: where the request comes from, who asks, and how often they have."""

    hook: Hook
    writes: Writes | None
    trusted: frozenset[str]
    problem_types: str

    async def passed(self, request: Request) -> User:
        """Who asks. Nothing of the body has been read. Raises Problem, and what the hook raises."""
        writing = request.method in WRITING
        if writing:
            wire.refuse_cross_site(request.headers, self.trusted)
            wire.require_json(request.headers)
        user = await self._who(request)
        if writing:
            if not user.may_save:
                raise Problem("forbidden", "You may read this, and not write. Nothing was written.")
            if self.writes is not None:
                await self.writes.count(user.name)
        return user

    async def _who(self, request: Request) -> User:
        ask: Callable[[Request], Any] = self.hook
        if inspect.iscoroutinefunction(ask):
            found = ask(request)
        else:
            found = await run_in_threadpool(ask, request)
        if inspect.isawaitable(found):  # of an object that is called, too
            found = await found
        if found is None or found == "":
            raise Problem("not-signed-in", "Sign in first. Nothing was written.")
        if isinstance(found, str):
            return User(found, owner=found)
        if not isinstance(found, User):
            # An account of the host's may have an `owner` too, and None there would open every document to it.
            raise DefinitionError(f"documents: the hook gives a User, text or None; got {type(found).__name__}.")
        return found


class Address:
    """One address and what its methods do. No exception leaves it, and none is shown."""

    def __init__(self, door: Door, acts: Mapping[str, Act], *, public: bool = False) -> None:
        self._door, self._acts, self._public = door, acts, public
        self._allowed = ", ".join(sorted({*acts, "OPTIONS", *(["HEAD"] if "GET" in acts else [])}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answered(request)
        except ClientDisconnect:
            return
        except Exception as error:
            answer = problem_of(error).response(request.url.path, self._door.problem_types)
        if request.method == "HEAD":
            answer.body = b""  # its length stays said
        await answer(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": self._allowed})
        act = self._acts.get("GET" if request.method == "HEAD" else request.method)
        if act is None:
            told = f"It takes {self._allowed}. Nothing was written."
            raise Problem("method-not-allowed", told, headers={"Allow": self._allowed})
        return await act(request, NOBODY if self._public else await self._door.passed(request))


NOBODY = User("", owner="")
"""Who asks for what everybody may have."""


class DocumentsRouter(Router):
    """What `router` makes."""

    def __init__(self, documents: Documents, door: Door, transactions: Transactions, max_body: int) -> None:
        self._documents, self._door, self._transactions, self._max_body = documents, door, transactions, max_body
        super().__init__(
            [
                Route(f"/{static.MODULE}", Address(door, {"GET": _module}, public=True)),
                Route("/{document_id}", Address(door, {"GET": self._get, "PUT": self._put})),
                Route("/{document_id}/versions", Address(door, {"GET": self._history, "POST": self._save})),
                Route("/{document_id}/versions/{version}", Address(door, {"GET": self._revision})),
                Route("/{document_id}/restore", Address(door, {"POST": self._restore})),
            ],
            redirect_slashes=False,
            default=self._nothing_here,
        )

    def openapi(self, prefix: str = "") -> dict[str, Any]:
        """These addresses as an OpenAPI 3.1 description, below the `prefix` that the router is mounted at."""
        return openapi.described(self._documents, prefix)

    async def _nothing_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        nothing = Problem("no-such-address", "Look at the address.")
        await nothing.response(Request(scope).url.path, self._door.problem_types)(scope, receive, send)

    # --- reading --------------------------------------------------------------------------------

    async def _get(self, request: Request, user: User) -> Response:
        found = await self._transactions.run(
            lambda tx: self._documents.get(tx, request.path_params["document_id"], owner=user.owner)
        )
        if wire.unchanged(request.headers, found.version):
            return Response(status_code=304, headers=_headers(found.version))
        shown = found.as_json()
        told = {name: shown[name] for name in ("id", "version", "content", "saved_by", "saved_at", "source")}
        return JSONResponse(told, headers=_headers(found.version))

    async def _history(self, request: Request, user: User) -> Response:
        limit, before = _number(request, "limit"), _number(request, "before")
        found = await self._transactions.run(
            lambda tx: self._documents.history(
                tx, request.path_params["document_id"], owner=user.owner, limit=50 if limit is None else limit,
                before=before,
            )
        )  # fmt: skip
        return JSONResponse({"versions": [_told(one.as_json(content=False)) for one in found]}, headers=COMMON)

    async def _revision(self, request: Request, user: User) -> Response:
        version = wire.number(request.path_params["version"])
        if version is None:
            raise Problem("version-not-found", "A version is a whole number from 0.")
        found = await self._transactions.run(
            lambda tx: self._documents.revision(tx, request.path_params["document_id"], version, owner=user.owner)
        )
        if wire.unchanged(request.headers, found.version):
            return Response(status_code=304, headers=_headers(found.version))
        return JSONResponse(_told(found.as_json()), headers=_headers(found.version))

    # --- writing --------------------------------------------------------------------------------

    async def _save(self, request: Request, user: User) -> Response:
        change = wire.asked_to_save(request.headers, await self._body(request))
        return self._answer(request, await self._saved(request, user, change), 201)

    async def _put(self, request: Request, user: User) -> Response:
        change = wire.asked_to_replace(request.headers, await self._body(request))
        return self._answer(request, await self._saved(request, user, change), 200)

    async def _restore(self, request: Request, user: User) -> Response:
        change = wire.asked_to_restore(request.headers, await self._body(request))

        def restore(tx: Session, document_id: str) -> Saved:
            return self._documents.restore(
                tx, document_id, change.wanted, expected_version=change.expected_version, save_id=change.save_id,
                by=user.name, source=user.source, owner=user.owner,
            )  # fmt: skip

        return self._answer(request, await self._changed(request, user, change, restore), 201)

    async def _saved(self, request: Request, user: User, change: Change) -> Saved:
        def save(tx: Session, document_id: str) -> Saved:
            return self._documents.save(
                tx, document_id, change.wanted, expected_version=change.expected_version, save_id=change.save_id,
                by=user.name, source=user.source, owner=user.owner,
            )  # fmt: skip

        return await self._changed(request, user, change, save)

    async def _changed(
        self, request: Request, user: User, change: Change, make: Callable[[Session, str], Saved]
    ) -> Saved:
        """What came of it, committed. Raises Problem for a conflict, with what is there instead."""
        document_id = request.path_params["document_id"]

        def work(tx: Session) -> Saved | Problem:
            try:
                return make(tx, document_id)
            except VersionConflict as refused:  # it wrote nothing, and the transaction goes on
                current = self._documents.get(tx, document_id, owner=user.owner)
                return conflict(refused, current, change.by_header)

        done = await self._transactions.run(work)
        if isinstance(done, Problem):
            raise done
        return done

    async def _body(self, request: Request) -> dict[str, Any]:
        return wire.parsed(await wire.read_body(request, self._max_body))

    def _answer(self, request: Request, saved: Saved, made: int) -> Response:
        told = {"version": saved.version, "saved_at": instant(saved.saved_at), "repeated": saved.repeated}
        headers = _headers(saved.version)
        if made == 201 and not saved.repeated:
            named = checked_id(request.path_params["document_id"])  # in its one spelling, whatever the address had
            # Encoded again: where it is mounted may hold what the client sent, and a header takes neither all letters
            # nor a line's end. The save is committed by now, so no header may fail it.
            mounted = quote(request.scope.get("root_path", ""), safe="/!$&'()*+,;=:@~", errors="replace")
            headers["Location"] = f"{mounted}/{named}/versions/{saved.version}"
        return JSONResponse(told, 200 if saved.repeated else made, headers)


async def _module(request: Request, _: User) -> Response:
    return static.served(request.headers, request.query_params.get("v"))


def _headers(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"', **COMMON}


def _told(revision: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in revision.items() if name != "document_id"}


def _number(request: Request, name: str) -> int | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    number = wire.number(given)
    if number is None:
        raise Problem("malformed", f"{name} is a whole number.")
    return number
