"""Documents over HTTP: what each request answers, and that one that is refused leaves everything as it was."""

import asyncio
import json
import logging
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from fastapi import HTTPException as FastAPIRefusal
from limits.storage import MemoryStorage
from sqlalchemy import NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from durable_core.documents import MOST_BYTES, User, router, static, static_url
from durable_core.documents.problems import KINDS
from durable_core.errors import DefinitionError
from tests.core.test_documents import everything

JSON = {"content-type": "application/json"}


class Web:
    """A client of an app in this process; every request names who sends it."""

    def __init__(self, app):
        self.app = app

    def ask(self, method, path, *, who="dana", **how):
        return self.together([(method, path)], who=who, **how)[0]

    def together(self, asked, *, who="dana", headers=(), **how):
        """All at once; the answers in the order of the requests."""
        headers = {"x-user": who, **dict(headers)} if who else dict(headers)

        async def all_of_them():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://notes.example.com") as client:
                return await asyncio.gather(
                    *(client.request(method, path, headers=headers, **how) for method, path in asked)
                )

        return asyncio.run(all_of_them())

    def save(self, document_id, title, expected, **more):
        body = {"expected_version": expected, "content": {"title": title}, **more}
        return self.ask("POST", f"/briefs/{document_id}/versions", json=body)

    def put(self, document_id, title, version, **how):
        return self.ask(
            "PUT", f"/briefs/{document_id}", json={"title": title}, headers={"if-match": f'"{version}"'}, **how
        )


def by_header(request):
    return request.headers.get("x-user")


@pytest.fixture
def serve(desk, other_engine):
    """Serve the briefs under /briefs, as a host would."""

    def _serve(of=None, sessions=None, user=by_header, **how):
        made = router(of or desk.briefs, sessions or sessionmaker(other_engine), user=user, **how)
        return Web(Starlette(routes=[Mount("/briefs", made)]))

    return _serve


@pytest.fixture
def web(serve):
    return serve()


@pytest.fixture
def unchanged(engine):
    """Whether the tables are as they were when the test began to ask."""
    before = None

    def _unchanged():
        nonlocal before
        if before is None:
            before = everything(engine)
        return everything(engine) == before

    return _unchanged


def problem(answer, status, reason):
    told = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, told["status"], told["reason"]) == (status, status, reason), told
    assert told["type"].endswith(f":{reason}")
    assert told["title"] == KINDS[reason].title
    assert told["instance"] == answer.request.url.path
    assert answer.headers["cache-control"] == "no-store"
    return told


# --- reading --------------------------------------------------------------------------------------


def test_a_document_is_read_with_its_version_as_the_entity_tag(desk, web):
    made = desk.brief(saves=2)
    answer = web.ask("GET", f"/briefs/{made.id}")
    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert answer.headers["cache-control"] == "private, no-cache"
    told = answer.json()
    assert told.pop("saved_at").endswith("Z")
    assert told == {
        "id": made.id, "version": 2, "content": {"title": "Q3 2", "body": ""}, "saved_by": "dana", "source": "user"
    }  # fmt: skip


@pytest.mark.parametrize("known", ['"2"', 'W/"2"', '"1", W/"2-gzip"', "*"])
def test_a_reader_who_has_the_version_is_told_so_and_no_more(desk, web, known):
    made = desk.brief(saves=2)
    answer = web.ask("GET", f"/briefs/{made.id}", headers={"if-none-match": known})
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", '"2"')
    assert answer.headers["cache-control"] == "private, no-cache"
    assert web.ask("GET", f"/briefs/{made.id}", headers={"if-none-match": '"1"'}).status_code == 200


def test_head_says_what_get_says_without_the_body(desk, web):
    path = f"/briefs/{desk.brief().id}"
    got, head = web.ask("GET", path), web.ask("HEAD", path)
    assert (head.status_code, head.headers) == (200, got.headers)
    bodies = []

    async def listening(scope, receive, send):
        async def heard(message):
            bodies.append(message.get("body", b""))
            await send(message)

        await web.app(scope, receive, heard)

    Web(listening).ask("HEAD", path)  # the client itself would drop a body
    assert b"".join(bodies) == b""


def test_what_an_address_takes_is_said_and_cors_is_not_opened(desk, web):
    path = f"/briefs/{desk.brief().id}"
    asked = web.ask("OPTIONS", path, headers={"origin": "https://evil.example", "access-control-request-method": "PUT"})
    assert (asked.status_code, asked.headers["allow"]) == (204, "GET, HEAD, OPTIONS, PUT")
    refused = web.ask("DELETE", path)
    problem(refused, 405, "method-not-allowed")
    assert refused.headers["allow"] == "GET, HEAD, OPTIONS, PUT"
    read = web.ask("GET", path, headers={"origin": "https://evil.example"})
    assert not [
        name for answer in (asked, refused, read) for name in answer.headers if name.startswith("access-control")
    ]


def test_the_history_is_read_newest_first_and_page_by_page(desk, web):
    made = desk.brief(saves=3)
    path = f"/briefs/{made.id}/versions"
    told = web.ask("GET", path).json()["versions"]
    assert [(one["version"], one["reason"]) for one in told] == [
        (3, None), (2, "overwrite"), (1, "overwrite"), (0, "overwrite")
    ]  # fmt: skip
    assert not [one for one in told if "content" in one]
    assert [one["version"] for one in web.ask("GET", f"{path}?limit=2&before=3").json()["versions"]] == [2, 1]
    for bad in ("limit=0", "limit=many", "limit=100000", "before=-1", "limit="):
        problem(web.ask("GET", f"{path}?{bad}"), 400, "malformed")


@pytest.mark.parametrize("spelled", ["1-gzip", "1;br", "01", "+1", "1.0", "\u0661", "", "9223372036854775808"])
def test_a_number_in_an_address_is_spelled_in_one_way(desk, web, spelled):
    made = desk.brief(saves=2)
    if spelled:
        problem(web.ask("GET", f"/briefs/{made.id}/versions/{spelled}"), 404, "version-not-found")
    for name in ("limit", "before"):
        problem(web.ask("GET", f"/briefs/{made.id}/versions", params={name: spelled}), 400, "malformed")


def test_one_version_is_read_the_current_one_too(desk, web):
    made = desk.brief(saves=1)
    first = web.ask("GET", f"/briefs/{made.id}/versions/0")
    assert (first.json()["content"]["title"], first.headers["etag"]) == ("Q3", '"0"')
    assert web.ask("GET", f"/briefs/{made.id}/versions/1").json()["content"]["title"] == "Q3 1"
    for none in ("2", "-1", "x", "01", str(2**63), "99999999999999999999999"):
        problem(web.ask("GET", f"/briefs/{made.id}/versions/{none}"), 404, "version-not-found")


# --- saving ---------------------------------------------------------------------------------------


def test_a_save_in_the_form_of_the_body_makes_the_next_version(desk, web):
    made = desk.brief()
    answer = web.save(made.id, "Q4", 0)
    assert (answer.status_code, answer.headers["etag"]) == (201, '"1"')
    told = answer.json()
    assert (told["version"], told["repeated"], told["saved_at"][-1]) == (1, False, "Z")
    assert web.ask("GET", answer.headers["location"]).json()["content"]["title"] == "Q4"
    assert (desk.raw(made.id).version, desk.raw(made.id).saved_by) == (1, "dana")


def test_an_id_in_another_spelling_is_the_same_document(desk, web):
    made = desk.brief()
    arabic = made.id.translate({ord(digit): 0x660 + int(digit) for digit in "0123456789"})
    for version, spelled in enumerate((made.id.upper(), f"{{{made.id}}}", made.id.replace("-", ""), arabic)):
        answer = web.save(spelled, "Q4", version)
        assert answer.headers["location"] == f"/briefs/{made.id}/versions/{version + 1}"


def test_a_save_in_the_form_of_the_header_makes_the_next_version(desk, web):
    made = desk.brief()
    answer = web.put(made.id, "Q4", 0)
    assert (answer.status_code, answer.headers["etag"], answer.json()["version"]) == (200, '"1"', 1)
    formed = {"expected_version": 1, "content": {"title": "Q5"}}
    assert web.ask("PUT", f"/briefs/{made.id}", json=formed).json()["version"] == 2
    assert desk.raw(made.id).content["title"] == "Q5"


@pytest.mark.spec("documents", 18)
def test_a_stale_save_is_refused_with_what_is_there_and_changes_nothing_at_all(desk, web, unchanged):
    made = desk.brief(saves=2)
    unchanged()

    mixed = {"expected_version": 1, "content": {"title": "mine"}, "owner": "eve"}
    problem(web.ask("POST", f"/briefs/{made.id}/versions", json=mixed), 400, "mixed-update")
    told = problem(web.save(made.id, "mine", 1), 409, "version-conflict")
    assert (told["expected_version"], told["current_version"], told["saved_by"]) == (1, 2, "dana")
    assert told["current"] == {"title": "Q3 2", "body": ""}
    assert told["saved_at"] in told["detail"]
    assert problem(web.put(made.id, "mine", 1), 412, "version-conflict")["current_version"] == 2
    assert unchanged()


@pytest.mark.spec("documents", 19)
@pytest.mark.parametrize("form", ["header", "body"])
def test_of_20_saves_at_once_one_is_made(desk, web, form):
    made = desk.brief(saves=4)
    address = f"/briefs/{made.id}"
    if form == "header":
        how = {"json": {"title": "mine"}, "headers": {"if-match": '"4"'}}
    else:
        how = {"json": {"expected_version": 4, "content": {"title": "mine"}}}
    answers = web.together([("PUT", address)] * 20, **how)

    assert sorted(answer.status_code for answer in answers) == [200, *[412 if form == "header" else 409] * 19]
    assert {answer.json().get("current_version") for answer in answers} == {5, None}
    assert desk.raw(made.id).version == 5
    assert [version for version, _, _ in desk.revisions(made.id)] == [0, 1, 2, 3, 4]


@pytest.mark.spec("documents", 20)
def test_without_a_version_or_with_more_than_content_nothing_is_written(desk, web, unchanged):
    made = desk.brief(saves=1)
    unchanged()
    address = f"/briefs/{made.id}"

    problem(web.ask("POST", f"{address}/versions", json={"content": {"title": "mine"}}), 428, "version-required")
    problem(web.ask("PUT", address, json={"title": "mine"}), 428, "version-required")
    problem(web.ask("PUT", address, json={"title": "mine"}, headers={"if-match": "*"}), 428, "version-required")
    problem(web.ask("POST", f"{address}/restore", json={"version": 0}), 428, "version-required")
    mixed = {"expected_version": 1, "content": {"title": "mine"}, "folder": "archive"}
    problem(web.ask("POST", f"{address}/versions", json=mixed), 400, "mixed-update")
    problem(web.ask("PUT", address, json=mixed), 400, "mixed-update")
    assert unchanged()


ASKED = [
    ("GET", ""), ("PUT", ""), ("GET", "/versions"), ("GET", "/versions/0"), ("POST", "/versions"), ("POST", "/restore")
]  # fmt: skip


@pytest.mark.spec("documents", 21)
@pytest.mark.parametrize(("method", "rest"), ASKED)
def test_anothers_a_deleted_and_an_unknown_document_are_answered_alike(desk, web, engine, unchanged, method, rest):
    theirs, gone = desk.brief(owner="eve"), desk.brief()
    another = desk.collection("letter")
    elsewhere = desk.brief(of=another)
    with engine.begin() as tx:
        desk.briefs.delete(tx, gone.id, expected_version=0, by="dana")
    unchanged()
    how = {}
    if method != "GET":
        how["json"] = {"expected_version": 0, **({"version": 0} if rest == "/restore" else {"content": {"title": "x"}})}

    told = set()
    for named in (theirs.id, gone.id, elsewhere.id, str(uuid4()), "nothing"):
        answer = web.ask(method, f"/briefs/{named}{rest}", **how)
        problem(answer, 404, "not-found")
        lines = [(name, value) for name, value in answer.headers.items() if name != "content-length"]
        told.add((answer.text.replace(named, "ID"), str(lines)))
    assert len(told) == 1
    assert unchanged()


def test_what_a_program_restores_is_told_as_a_programs(desk, serve, engine):
    made = desk.brief(saves=1)
    web = serve(user=lambda request: User("bot", owner="dana", source="ai"))
    answer = web.ask("POST", f"/briefs/{made.id}/restore", json={"version": 0, "expected_version": 1})
    assert answer.status_code == 201
    assert (desk.raw(made.id).saved_by, desk.raw(made.id).source) == ("bot", "ai")
    with engine.begin() as tx:
        desk.briefs.restore(tx, made.id, 1, expected_version=2, by="dana")
    assert desk.raw(made.id).source == "user"


def test_an_operator_who_may_see_all_sees_anothers(desk, serve):
    theirs = desk.brief(owner="eve")
    web = serve(user=lambda request: User("ops", sees_all=True, source="ai"))
    assert web.ask("GET", f"/briefs/{theirs.id}").status_code == 200
    assert web.save(theirs.id, "Q4", 0).status_code == 201
    saved = desk.raw(theirs.id)
    assert (saved.saved_by, saved.source, saved.owner) == ("ops", "ai", "eve")


@pytest.mark.parametrize("unclear", [{}, {"owner": None}, {"owner": "eve", "sees_all": True}, {"sees_all": False}])
def test_who_has_no_owner_sees_everything_only_where_it_is_said(desk, serve, unclear):
    theirs = desk.brief(owner="eve")
    with pytest.raises(DefinitionError, match="a User has an owner, or sees_all=True"):
        User("dana", **unclear)
    web = serve(user=lambda request: User("dana", **unclear))
    assert web.ask("GET", f"/briefs/{theirs.id}").status_code == 500


def test_a_put_of_the_bodys_form_may_name_its_version_in_the_header(desk, serve):
    made, save_id = desk.brief(), str(uuid4())
    body = {"content": {"title": "Q4"}, "save_id": save_id}
    web = serve()
    answers = [web.ask("PUT", f"/briefs/{made.id}", json=body, headers={"if-match": '"0"'}) for _ in range(2)]
    assert [answer.json()["repeated"] for answer in answers] == [False, True]
    assert (desk.raw(made.id).content["title"], desk.raw(made.id).version) == ("Q4", 1)


@pytest.mark.spec("documents", 25)
@pytest.mark.parametrize("form", ["body", "header"])
def test_a_save_repeated_after_a_lost_answer_is_a_success_without_another_version(desk, web, form):
    made, save_id = desk.brief(), str(uuid4())
    address = f"/briefs/{made.id}"

    def save(title="Q4", save_id=save_id):
        if form == "body":
            return web.save(made.id, title, 0, save_id=save_id)
        headers = {"if-match": '"0"', "idempotency-key": f'"{save_id}"'}
        return web.ask("PUT", address, json={"title": title}, headers=headers)

    first, again = save(), save()
    assert first.json() == {**again.json(), "repeated": False}
    assert (first.status_code, again.status_code) == (201 if form == "body" else 200, 200)
    assert (again.json()["repeated"], again.json()["version"], again.headers["etag"]) == (True, 1, '"1"')
    assert (desk.raw(made.id).version, len(desk.revisions(made.id))) == (1, 1)

    problem(save(save_id=str(uuid4())), 409 if form == "body" else 412, "version-conflict")
    problem(save("something else"), 409, "save-id-reused")
    assert (desk.raw(made.id).version, len(desk.revisions(made.id))) == (1, 1)


@pytest.mark.parametrize("version", [-1, 2**63, "3", 1.0, True, None, "missing", 10**30])
def test_a_version_that_is_none_is_refused_and_writes_nothing(desk, web, unchanged, version):
    """Attack A39; version 0 of a document that is past it is a conflict."""
    made = desk.brief(saves=1)
    unchanged()
    body = {"expected_version": version, "content": {"title": "mine"}}
    if version == "missing":
        del body["expected_version"]
    status, reason = (428, "version-required") if version == "missing" else (400, "version-malformed")
    reason = "malformed" if version == 10**30 or version == 2**63 else reason  # no JSON of ours has such a number
    problem(web.ask("POST", f"/briefs/{made.id}/versions", json=body), status, reason)
    if version != "missing":
        problem(web.ask("PUT", f"/briefs/{made.id}", json=body), status, reason)
    problem(web.save(made.id, "mine", 0), 409, "version-conflict")
    problem(web.save(made.id, "mine", 2**63 - 1), 409, "version-conflict")
    assert unchanged()


def test_two_forms_that_disagree_are_refused_and_two_that_agree_are_one(desk, web, unchanged):
    made = desk.brief(saves=1)
    unchanged()
    address, body = f"/briefs/{made.id}/versions", {"expected_version": 1, "content": {"title": "mine"}}
    problem(web.ask("POST", address, json=body, headers={"if-match": '"0"'}), 400, "versions-disagree")
    assert unchanged()
    assert web.ask("POST", address, json=body, headers={"if-match": 'W/"1"'}).status_code == 201


def test_content_that_does_not_fit_is_refused_with_the_place_and_without_the_value(desk, web, unchanged):
    made = desk.brief()
    unchanged()
    body = {"expected_version": 0, "content": {"title": {"x": "hunter2"}, "secret": "hunter2"}}
    answer = web.ask("POST", f"/briefs/{made.id}/versions", json=body)
    told = problem(answer, 422, "invalid-content")
    assert {error["at"] for error in told["errors"]} == {"title", "secret"}
    assert "title" in told["detail"]
    assert "hunter2" not in answer.text
    for content in ([], "text", 3, None):
        problem(
            web.ask("POST", f"/briefs/{made.id}/versions", json={"expected_version": 0, "content": content}),
            422,
            "invalid-content",
        )
    assert unchanged()


@pytest.mark.parametrize("team", ["%C5%82%C3%B3d%C5%BA", "a%0D%0AX-Injected%3A%201", "a%20b", "a@b"])
def test_a_save_is_answered_with_its_address_wherever_the_router_is_mounted(desk, other_engine, team):
    made = desk.brief()
    served = router(desk.briefs, sessionmaker(other_engine), user=by_header)
    web = Web(Starlette(routes=[Mount("/{team}/briefs", served)]))
    save = {"expected_version": 0, "content": {"title": "Q4"}}
    answer = web.ask("POST", f"/{team}/briefs/{made.id}/versions", json=save)
    assert answer.status_code == 201
    # As it was sent, but for what need not be encoded.
    assert answer.headers["location"] == f"/{team.replace('%3A', ':')}/briefs/{made.id}/versions/1"
    assert web.ask("GET", answer.headers["location"]).json()["content"]["title"] == "Q4"


def test_a_restored_version_comes_back_as_a_new_one(desk, web):
    made = desk.brief(saves=2)
    address = f"/briefs/{made.id}/restore"
    answer = web.ask("POST", address, json={"version": 0, "expected_version": 2})
    assert (answer.status_code, answer.json()["version"], answer.headers["etag"]) == (201, 3, '"3"')
    assert desk.raw(made.id).content["title"] == "Q3"
    stale = problem(web.ask("POST", address, json={"version": 1, "expected_version": 2}), 409, "version-conflict")
    assert stale["current_version"] == 3
    problem(web.ask("POST", address, json={"version": 9, "expected_version": 3}), 404, "version-not-found")
    assert desk.raw(made.id).version == 3


# --- size -----------------------------------------------------------------------------------------


def exactly(size):
    """Content whose canonical text takes so many bytes."""
    return {"body": "x" * (size - len('{"body":"","title":""}')), "title": ""}


def test_the_largest_content_is_taken_and_one_byte_more_is_not(desk, web, unchanged):
    made = desk.brief()
    address = f"/briefs/{made.id}/versions"
    unchanged()
    refused = web.ask("POST", address, json={"expected_version": 0, "content": exactly(MOST_BYTES + 1)})
    assert problem(refused, 413, "content-too-large")["limit"] == MOST_BYTES
    assert unchanged()
    assert web.ask("POST", address, json={"expected_version": 0, "content": exactly(MOST_BYTES)}).status_code == 201


MOST_CHUNKS = 200


def sent_raw(app, path, chunks, headers):
    """The status of a request that is sent chunk by chunk, and how many chunks were taken."""
    taken, status = 0, None
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"", "scheme": "http", "client": None,
        "server": ("notes.example.com", 80), "headers": headers,
    }  # fmt: skip

    async def receive():
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": next(chunks, b""), "more_body": taken <= MOST_CHUNKS}

    async def send(message):
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    asyncio.run(app(scope, receive, send))
    return status, taken


@pytest.mark.parametrize(
    ("length", "most_taken"),
    [(None, 51), (b"10", 51), (b"999999999", 0), (b"9" * 19, 0)],
    ids=["none", "lie", "large", "huge"],
)
def test_a_body_that_is_too_large_is_not_read_to_its_end(desk, web, length, most_taken):
    headers = [(b"content-type", b"application/json"), (b"x-user", b"dana"), (b"host", b"notes.example.com")]
    if length is not None:
        headers.append((b"content-length", length))
    chunks = iter([b"x" * 10_000] * MOST_CHUNKS)
    status, taken = sent_raw(web.app, f"/briefs/{desk.brief().id}/versions", chunks, headers)
    assert status == 413
    assert taken <= most_taken


def test_a_length_that_is_none_is_refused(desk, web):
    for length in ("-1", "many", "1e3", "9" * 30):
        headers = {**JSON, "content-length": length}
        answer = web.ask("POST", f"/briefs/{desk.brief().id}/versions", content=b"{}", headers=headers)
        problem(answer, 400, "malformed")


# --- who asks -------------------------------------------------------------------------------------


def test_nobody_is_401_before_anything_is_read(desk, web, unchanged):
    made = desk.brief()
    unchanged()
    for method, rest in ASKED:
        how = {} if method == "GET" else {"content": b"no json", "headers": JSON}
        problem(web.ask(method, f"/briefs/{made.id}{rest}", who=None, **how), 401, "not-signed-in")
    assert unchanged()


@pytest.mark.parametrize("kind", ["sync", "async", "object"])
def test_the_hook_may_be_a_function_a_coroutine_or_an_object(desk, serve, kind):
    async def awaited(request):
        return by_header(request)

    class Hook:
        async def __call__(self, request):
            return by_header(request)

    web = serve(user={"sync": by_header, "async": awaited, "object": Hook()}[kind])
    made = desk.brief()
    assert web.ask("GET", f"/briefs/{made.id}").status_code == 200
    problem(web.ask("GET", f"/briefs/{made.id}", who="eve"), 404, "not-found")
    problem(web.ask("GET", f"/briefs/{made.id}", who=None), 401, "not-signed-in")


def test_no_text_is_nobody(desk, serve):
    problem(serve(user=lambda request: "").ask("GET", f"/briefs/{desk.brief().id}"), 401, "not-signed-in")


def test_what_the_hook_gives_is_a_user_and_nothing_that_looks_like_one(desk, serve, unchanged, caplog):
    class Account:
        name, owner, may_save, source = "eve", None, True, "user"

    made = desk.brief()
    assert unchanged()
    for given in (Account(), False, 7, {"name": "eve"}):
        web = serve(user=lambda request, given=given: given)
        problem(web.ask("GET", f"/briefs/{made.id}"), 500, "internal")
        problem(web.save(made.id, "Q4", 0), 500, "internal")
    assert unchanged()
    assert "DefinitionError: documents: the hook gives a User, text or None; got Account." in caplog.text


@pytest.mark.parametrize(
    "origins", ["https://app.example.com", ["null"], ["*"], ["https://app.example.com/notes"], [""]]
)
def test_what_is_no_list_of_origins_is_a_definition_error(desk, serve, origins):
    with pytest.raises(DefinitionError, match="trusted_origins"):
        serve(trusted_origins=origins)


def test_the_hook_says_no_in_its_own_words(desk, serve):
    made = desk.brief()

    def refuse(raised):
        def hook(request):
            raise raised

        return serve(user=hook)

    told = refuse(HTTPException(403, "Your trial is over.")).ask("GET", f"/briefs/{made.id}")
    assert problem(told, 403, "forbidden")["detail"] == "Your trial is over."
    told = refuse(FastAPIRefusal(401, headers={"WWW-Authenticate": "Bearer"})).ask("GET", f"/briefs/{made.id}")
    problem(told, 401, "not-signed-in")
    assert told.headers["www-authenticate"] == "Bearer"
    problem(refuse(HTTPException(451)).ask("GET", f"/briefs/{made.id}"), 451, "refused")


def test_a_user_who_may_only_read_writes_nothing(desk, serve, unchanged):
    made = desk.brief(saves=1)
    unchanged()
    web = serve(user=lambda request: User("dana", owner="dana", may_save=False))
    assert web.ask("GET", f"/briefs/{made.id}").status_code == 200
    problem(web.save(made.id, "mine", 1), 403, "forbidden")
    problem(web.put(made.id, "mine", 1), 403, "forbidden")
    problem(web.ask("POST", f"/briefs/{made.id}/restore", json={"version": 0, "expected_version": 1}), 403, "forbidden")
    assert unchanged()


def test_a_page_of_another_site_writes_nothing_even_with_the_users_cookies(desk, web, serve, unchanged):
    made = desk.brief()
    unchanged()
    address, body = f"/briefs/{made.id}/versions", {"expected_version": 0, "content": {"title": "theirs"}}
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        problem(web.ask("POST", address, json=body, headers=headers), 403, "cross-site")
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = web.ask("POST", address, content=json.dumps(body), headers={"content-type": media})
        problem(answer, 415, "unsupported-media-type")
    assert unchanged()
    trusting = serve(trusted_origins=["https://app.example.com"])
    headers = {"origin": "https://app.example.com", "sec-fetch-site": "cross-site"}
    assert trusting.ask("POST", address, json=body, headers=headers).status_code == 201


def test_too_many_writes_are_refused_and_reading_goes_on(desk, serve, unchanged):
    made, storage = desk.brief(), MemoryStorage()
    web, beside = serve(writes="2/minute", storage=storage), serve(writes="2/minute", storage=storage)
    assert web.save(made.id, "Q4", 0).status_code == 201
    problem(beside.save(made.id, "Q5", 0), 409, "version-conflict")
    unchanged()
    refused = web.put(made.id, "Q5", 1)
    problem(refused, 429, "too-many-writes")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert unchanged()
    assert web.ask("GET", f"/briefs/{made.id}").status_code == 200
    assert web.put(desk.brief(owner="eve").id, "Q5", 0, who="eve").status_code == 200


def test_a_count_that_cannot_be_asked_limits_nobody(desk, serve, caplog):
    class Down(MemoryStorage):
        def acquire_entry(self, *given, **named):
            raise ConnectionError("no route to redis://:secret@cache")

    web = serve(storage=Down())
    with caplog.at_level(logging.WARNING, "durable.documents"):
        assert web.save(desk.brief().id, "Q4", 0).status_code == 201
    assert "document_writes_not_counted" in caplog.messages
    assert "secret" not in caplog.text


# --- when things fail -----------------------------------------------------------------------------


def test_a_database_that_is_away_is_503_and_the_same_save_may_be_sent_again(desk, serve):
    away = create_engine("postgresql+psycopg://nobody:hunter2@127.0.0.1:1/none")
    answer = serve(sessions=sessionmaker(away)).save(desk.brief().id, "Q4", 0, save_id=str(uuid4()))
    told = problem(answer, 503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert "save_id" in told["detail"]
    assert "127.0.0.1" not in answer.text
    assert "hunter2" not in answer.text


def test_a_failure_shows_nothing_of_the_inside_and_is_logged(desk, serve, caplog):
    def hook(request):
        raise RuntimeError("password hunter2 at /srv/app/secrets.py")

    with caplog.at_level(logging.ERROR, "durable.documents"):
        answer = serve(user=hook).ask("GET", f"/briefs/{desk.brief().id}")
    problem(answer, 500, "internal")
    assert "hunter2" not in answer.text
    assert "RuntimeError" not in answer.text
    assert "hunter2" in caplog.text, "whoever runs it finds the reason in the log"


def test_a_document_that_is_being_changed_is_waited_for_no_longer_than_said(desk, serve, engine, monkeypatch):
    made, ran = desk.brief(), []
    monkeypatch.setattr("durable_core.documents.transactions.LOCK_WAIT", "100ms")
    # Where the bound were missing, the server's own ends the wait, so that this fails and does not hang.
    slower = create_engine(engine.url, connect_args={"options": "-c lock_timeout=3s"})
    event.listen(slower, "after_cursor_execute", lambda conn, cursor, statement, *_: ran.append(statement))
    with engine.begin() as tx:
        desk.briefs.save(tx, made.id, {"title": "theirs"}, expected_version=0, by="eve")
        answer = serve(sessions=sessionmaker(slower)).save(made.id, "mine", 0)
    slower.dispose()
    problem(answer, 503, "unavailable")
    assert any("set_config('lock_timeout'" in statement for statement in ran)
    assert desk.raw(made.id).content["title"] == "theirs"


def test_at_a_stricter_isolation_too_one_of_many_saves_is_made(desk, serve, engine):
    strict = create_engine(engine.url, isolation_level="SERIALIZABLE", pool_size=20)
    made = desk.brief()
    body = {"expected_version": 0, "content": {"title": "mine"}}
    answers = serve(sessions=sessionmaker(strict)).together([("PUT", f"/briefs/{made.id}")] * 8, json=body)
    strict.dispose()
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 7]
    assert desk.raw(made.id).version == 1


# --- where it is mounted --------------------------------------------------------------------------


def test_an_async_sessionmaker_serves_as_well(desk, serve, engine):
    apart = create_async_engine(engine.url, poolclass=NullPool)
    web = serve(sessions=async_sessionmaker(apart))
    made = desk.brief()
    assert web.save(made.id, "Q4", 0).status_code == 201
    assert problem(web.save(made.id, "Q5", 0), 409, "version-conflict")["current"]["title"] == "Q4"
    assert [one["version"] for one in web.ask("GET", f"/briefs/{made.id}/versions").json()["versions"]] == [1, 0]
    answers = web.together([("PUT", f"/briefs/{made.id}")] * 5, json={"title": "mine"}, headers={"if-match": '"1"'})
    assert sorted(answer.status_code for answer in answers) == [200, 412, 412, 412, 412]


def dispatched(made):
    """How an ASGI app that mounts nothing, as Django's is none that does, hands requests on by their path."""

    async def app(scope, receive, send):
        assert scope["path"].startswith("/briefs/")
        await made({**scope, "root_path": "/briefs"}, receive, send)

    return app


def test_it_is_found_under_fastapi_and_behind_a_bare_dispatch_and_alone(desk, other_engine):
    made_router = router(desk.briefs, sessionmaker(other_engine), user=by_header)
    fast = FastAPI()
    fast.mount("/briefs", made_router)
    for app, prefix in ((fast, "/briefs"), (dispatched(made_router), "/briefs"), (made_router, "")):
        made, web = desk.brief(), Web(app)
        answer = web.ask(
            "POST", f"{prefix}/{made.id}/versions", json={"expected_version": 0, "content": {"title": "Q4"}}
        )
        assert answer.headers["location"] == f"{prefix}/{made.id}/versions/1"
        problem(web.ask("GET", f"{prefix}/{uuid4()}"), 404, "not-found")
        problem(web.ask("GET", f"{prefix}/{made.id}/nothing/here"), 404, "no-such-address")
        assert web.ask("GET", f"{prefix}/{made.id}").json()["version"] == 1


def test_a_websocket_is_closed_and_not_left_hanging(desk, other_engine):
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    made = router(desk.briefs, sessionmaker(other_engine), user=by_header)
    asyncio.run(made({"type": "websocket", "path": "/nothing", "headers": []}, receive, send))
    assert sent == ["websocket.close"]


def test_ids_and_bodies_of_any_shape_are_answered_and_never_500(desk, web, unchanged):
    made = desk.brief()
    unchanged()
    for named in ("%00", "%ff", "..%2f..", "%2e%2e", "é", "x" * 3000, "{}", "%s", "';--", made.id.replace("-", "%00")):
        assert web.ask("GET", f"/briefs/{named}").status_code in (404, 405), named
    for body in (b"", b"[]", b"{", b"\xff", b'{"expected_version":0,"content":{"title":"\\u0000"}}', b"[" * 100_000):
        for method, rest in (("POST", "/versions"), ("PUT", ""), ("POST", "/restore")):
            answer = web.ask(method, f"/briefs/{made.id}{rest}", content=body, headers=JSON)
            problem(answer, 400, "malformed")
    assert unchanged()


def test_the_browsers_half_is_served_to_everybody_and_kept_for_good_under_its_digest(web, tmp_path, monkeypatch):
    (tmp_path / "document-session.js").write_text("export const openDocument = () => {};\n")
    monkeypatch.setattr(static, "browser_path", lambda: tmp_path)
    address = static_url("/briefs/")
    kept = web.ask("GET", address, who=None)
    assert (kept.status_code, kept.text) == (200, "export const openDocument = () => {};\n")
    assert kept.headers["content-type"].startswith("text/javascript")
    assert "immutable" in kept.headers["cache-control"]
    for other in ("/briefs/document-session.js", "/briefs/document-session.js?v=older"):
        assert web.ask("GET", other, who=None).headers["cache-control"] == "no-cache"
    again = web.ask("GET", address, who=None, headers={"if-none-match": kept.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    problem(web.ask("PUT", "/briefs/document-session.js", json={}), 405, "method-not-allowed")


def test_a_document_as_it_is_described_is_as_it_is_answered(desk, other_engine):
    made_router = router(desk.briefs, sessionmaker(other_engine), user=by_header)
    described = made_router.openapi("/briefs")
    web = Web(Starlette(routes=[Mount("/briefs", made_router)]))
    made = desk.brief()
    of_get = described["paths"]["/briefs/{document_id}"]["get"]["responses"]["200"]["content"]["application/json"]
    assert set(of_get["schema"]["required"]) == set(web.ask("GET", f"/briefs/{made.id}").json())
    saving = described["paths"]["/briefs/{document_id}/versions"]
    of_post = saving["post"]["responses"]["201"]["content"]["application/json"]["schema"]
    assert set(of_post["required"]) == set(web.save(made.id, "Q4", 0).json())
    of_past = saving["get"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["versions"]
    told = web.ask("GET", f"/briefs/{made.id}/versions").json()["versions"]
    assert set(of_past["items"]["required"]) == set(told[0])
    of_one = described["paths"]["/briefs/{document_id}/versions/{version}"]["get"]["responses"]["200"]["content"]
    one = web.ask("GET", f"/briefs/{made.id}/versions/0").json()
    assert set(of_one["application/json"]["schema"]["required"]) == set(one)
    of_problem = described["components"]["schemas"]["DocumentProblem"]
    conflict = web.save(made.id, "Q5", 0).json()
    assert set(of_problem["required"]) <= set(conflict) <= set(of_problem["properties"])
    assert described["components"]["schemas"]["Brief"]["properties"].keys() == {"title", "body"}
    addresses = {route.path for route in made_router.routes} - {"/document-session.js"}
    assert {path.removeprefix("/briefs") for path in described["paths"]} == addresses


def test_the_setting_of_lock_timeout_ends_with_the_request(desk, web, other_engine):
    web.save(desk.brief().id, "Q4", 0)
    with other_engine.connect() as tx:
        assert tx.scalar(text("show lock_timeout")) == "0"
