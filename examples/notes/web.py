"""
The page of the notes: two boards that a household edits. `durable up -A worker --web web:app` in this folder serves it.

The sign-in is a toy: whoever says that they are Dana is Dana.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from notes import HOUSEHOLD, Board, Note, boards, suggest
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from durable_core.documents import User, router

PAGE = Path(__file__).parent / "page"
PEOPLE = ("dana", "sam")
COOKIE = "person"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
FIRST = (
    Board(title="Groceries", notes=[Note(id="milk", text="Milk"), Note(id="bread", text="Bread")]),
    Board(title="Holiday", notes=[Note(id="ferry", text="Book the ferry")]),
)

Transaction = sessionmaker(create_engine(os.environ["DURABLE_DATABASE_URL"]))


def who_asks(request: Request) -> User | None:
    """One of the household; they own the boards together."""
    name = request.cookies.get(COOKIE)
    return User(name, owner=HOUSEHOLD) if name in PEOPLE else None


async def index(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


async def me(request: Request) -> Response:
    person = who_asks(request)
    return JSONResponse({"name": person and person.name, "people": PEOPLE}, headers={"Cache-Control": "no-store"})


async def sign_in(request: Request) -> Response:
    name = (await request.json())["name"]
    if name not in PEOPLE:
        return Response(status_code=403)
    answer = Response(status_code=204)
    answer.set_cookie(COOKIE, name, httponly=True, samesite="strict")
    return answer


async def sign_out(request: Request) -> Response:
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def titles(request: Request) -> Response:
    if who_asks(request) is None:
        return Response(status_code=401)
    with Transaction.begin() as session:
        found = [boards.get(session, one.id) for one in reversed(boards.page(session, owner=HOUSEHOLD))]
    return JSONResponse([{"id": one.id, "title": one.content["title"]} for one in found])


async def ask_the_assistant(request: Request) -> Response:
    person = who_asks(request)
    if person is None:
        return Response(status_code=401)
    asked = await request.json()

    def enqueue() -> None:
        with Transaction.begin() as session:
            board = boards.get(session, asked["board"], owner=person.owner)
            suggest.enqueue(session, board.id, min(board.version, int(asked["version"])))

    await run_in_threadpool(enqueue)
    return Response(status_code=202)


def first_boards() -> None:
    """Two boards, where there is none."""
    with Transaction.begin() as session:
        if not boards.page(session, owner=HOUSEHOLD, limit=1):
            for board in FIRST:
                boards.create(session, board, owner=HOUSEHOLD, by="dana")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    await run_in_threadpool(first_boards)
    yield


class Policy:
    """Every answer carries the strictest policy that the page needs: nothing inline, nothing from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = POLICY
            await send(message)

        await self._app(scope, receive, with_policy)


app = Starlette(
    routes=[
        Route("/", index),
        Route("/me", me),
        Route("/sign-in", sign_in, methods=["POST"]),
        Route("/sign-out", sign_out, methods=["POST"]),
        Route("/titles", titles),
        Route("/suggestions", ask_the_assistant, methods=["POST"]),
        Mount("/boards", router(boards, Transaction, user=who_asks)),
        Mount("/page", StaticFiles(directory=PAGE)),
    ],
    middleware=[Middleware(Policy)],
    lifespan=lifespan,
)
