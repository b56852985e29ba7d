"""FastAPI answers after the commit: seen at the moment in which the response begins."""

from __future__ import annotations

from tests.examples.conftest import Programs
from tests.examples.pages import page

LOOK = """
import asyncio, runpy, sys

shown = runpy.run_path(sys.argv[1])
app, engine = shown["app"], shown["engine"]
from durable_core import deliveries


async def call(path):
    seen = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            with engine.connect() as tx:
                seen.append(len(deliveries.page(tx, limit=1000)))

    with engine.connect() as tx:
        before = len(deliveries.page(tx, limit=1000))
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"total=7", "headers": [], "root_path": "",
             "server": ("shop", 80), "client": ("ann", 1)}
    await app(scope, receive, send)
    return seen[0] - before


print([asyncio.run(call(path)) for path in ("/invoices", "/invoices/plain")])
"""


def committed_when_the_answer_begins(programs: Programs, code: str) -> list[int]:
    (programs.directory / "shown.py").write_text(code)
    (programs.directory / "look.py").write_text(LOOK)
    return [int(word) for word in programs.run("look.py", "shown.py").strip("[]\n ").split(",")]


def test_both_forms_of_the_page_have_committed_when_the_answer_begins(programs: Programs) -> None:
    assert committed_when_the_answer_begins(programs, page("docs/howto/fastapi.md").python) == [1, 1]


def test_without_the_scope_the_answer_begins_before_the_commit(programs: Programs) -> None:
    """What the page warns of; once FastAPI does otherwise, the page has to say so."""
    code = page("docs/howto/fastapi.md").python
    assert 'Depends(in_transaction, scope="function")' in code
    code = code.replace(', scope="function"', "").split("client = TestClient(app)")[0]

    assert committed_when_the_answer_begins(programs, code) == [0, 1]
