"""`durable cases`, and what `find` and `status` say of cases."""

import json
import sys
import textwrap

import pytest
from sqlalchemy import text

from durable_core import Event
from tests.cli.conftest import error_of, process, value_of
from tests.core.outside.desk import Desk

CARRIER = ("--actor", '{"system": "carrier"}')


@pytest.fixture
def desk(engine):
    made = Desk(engine)
    yield made
    made.forget()


@pytest.fixture
def proj(engine, run, tmp_path, monkeypatch):
    """`-A proj`: an app whose module declares a type; `proj("cases", "list")`."""
    (tmp_path / "cases_proj.py").write_text(
        textwrap.dedent(
            """
            import os

            from celery import Celery
            from pydantic import BaseModel
            from sqlalchemy import create_engine

            from durable_core import Attempts, Cases, CaseType, Scope, Unmet
            from durable_core.celery_binding import install

            app = Celery("cases_proj", broker="memory://")
            app.conf.durable_engine = create_engine(os.environ["PROJ_DATABASE"])
            install(app)


            class Room(BaseModel):
                items: dict[str, bool] = {}
                open: bool = True


            class Note(BaseModel):
                text: str = "nothing"


            room = CaseType("room", state=Room)


            def is_open(state):
                return state.open or Unmet("it is closed")


            def is_guard(state, actor):
                return actor is not None and actor.get("name") == "guard"


            @room.step("close", title="Close it", requires={"open": is_open}, permits={"guard": is_guard}, input=Note)
            def close(state, ctx):
                state.open = False
                ctx.correlate("doors", "D1", step="lift")
                return state


            @room.step("lift", scope=Scope(select=lambda state: list(state.items), key=str))
            def lift(state, ctx):
                state.items[ctx.scope_key] = True
                return state


            @room.step("burn", retry=Attempts(limit=1))
            def burn(state, ctx):
                raise ValueError("the safe's number is 4711")


            cases = Cases(app.conf.durable_engine, [room])


            def widened(state):
                if not state["items"]:
                    raise ValueError("nothing in it")
                return {**state, "items": {**state["items"], "lamp": False}}
            """
        )
    )
    url = engine.url.render_as_string(hide_password=False)
    environment = {"PROJ_DATABASE": url, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}

    def _proj(*line, **how):
        return process("-A", "cases_proj", *line, cwd=tmp_path, env=environment, **how)

    _proj.environment, _proj.folder = environment, tmp_path
    return _proj


@pytest.fixture
def room(engine):
    """A case of the app's type, as another process of it made it."""

    def _room(**state):
        with engine.begin() as tx:
            return str(
                tx.execute(
                    text(
                        "insert into durable.cases (id, case_type, state, created_at, updated_at) values"
                        " (gen_random_uuid(), 'room', cast(:state as jsonb), clock_timestamp(), clock_timestamp())"
                        " returning id"
                    ),
                    {"state": json.dumps({"items": {}, "open": True, **state})},
                ).scalar()
            )

    return _room


def told(done):
    """The one JSON value of a process."""
    return json.loads(done.stdout)


# --- without the code ----------------------------------------------------------------------------


def test_a_page_of_cases_has_no_states_and_the_step_that_has_one_now(durable, desk, engine, clock):
    first, second = desk.made(places=["Oslo"]), desk.made()
    shown = []
    desk.act = lambda state, ctx: shown.append(durable("cases", "list").stdout)
    desk.cases.execute(second, "tell")
    assert "tell" in shown[0]
    assert "Oslo" not in shown[0]
    listed = value_of(durable("cases", "list", "--type", desk.type.name, "--limit", "1", "--json"))
    assert [one["id"] for one in listed["cases"]] == [second]
    assert listed["next_after"] == second
    again = value_of(durable("cases", "list", "--after", second, "--json"))
    assert [one["id"] for one in again["cases"]] == [first]
    assert durable("cases", "list", "--after", "x").exit_code == 2


def test_a_dormant_case_is_listed_when_it_is_asked_for(durable, desk):
    case_id = desk.made()
    desk.act = lambda state, ctx: ctx.end()
    desk.cases.execute(case_id, "tell")
    assert case_id not in durable("cases", "list").stdout
    assert case_id in durable("cases", "list", "--dormant").stdout


def test_a_case_is_shown_by_any_beginning_of_its_id_and_its_state_on_demand(durable, desk):
    case_id = desk.made("P1", places=["Oslo"])
    desk.cases.execute(case_id, "tell")
    plain = durable("cases", "show", case_id[:13])
    assert plain.exit_code == 0, plain.output
    assert "P1" in plain.stdout
    assert "Oslo" not in plain.stdout
    assert "Oslo" in durable("cases", "show", case_id, "--state").stdout
    value = value_of(durable("cases", "show", case_id, "--json"))
    assert (value["seq"], value["entries"], value["claim"]) == (1, 2, None)
    assert "state" not in value
    assert error_of(durable("cases", "show", "0198c0de-0000-7000-8000-000000000000", "--json")) == "NOT_FOUND"


def test_the_journal_is_shown_without_payloads_unless_asked(durable, desk):
    case_id = desk.made()
    desk.cases.execute(case_id, "scan", actor={"system": "carrier"}, input={"place": "Oslo"})
    plain = durable("cases", "journal", case_id)
    assert [line.split()[2] for line in plain.stdout.splitlines()[1:]] == ["claimed", "completed"]
    assert "Oslo" not in plain.output
    assert "Oslo" in durable("cases", "journal", case_id, "--payload").stdout
    page = value_of(durable("cases", "journal", case_id, "--limit", "1", "--json"))
    assert ([one["entry"] for one in page["entries"]], page["next_after"]) == (["claimed"], 1)
    only = value_of(durable("cases", "journal", case_id, "--entry", "completed", "--step", "scan", "--json"))
    assert [one["number"] for one in only["entries"]] == [2]


def test_a_journal_that_was_edited_fails_its_verification(durable, desk, engine):
    case_id = desk.made()
    desk.cases.execute(case_id, "tell")
    whole = durable("cases", "verify", case_id)
    assert (whole.exit_code, "whole" in whole.stdout) == (0, True)
    head = value_of(durable("cases", "show", case_id, "--json"))["head"]
    assert durable("cases", "verify", case_id, "--head", head).exit_code == 0
    other = f"2:{'0' * 64}"
    assert durable("cases", "verify", case_id, "--head", other).exit_code == 6
    assert durable("cases", "verify", case_id, "--head", "nonsense").exit_code == 2
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        tx.execute(text("update durable.case_journal set step = 'other' where number = 1"))
    edited = durable("cases", "verify", case_id)
    assert (edited.exit_code, "NOT whole" in edited.stdout) == (6, True)
    told = value_of(durable("cases", "verify", case_id, "--json"))
    assert (told["ok"], told["faults"][0]["number"]) == (False, 1)


def test_dead_letters_are_listed_by_reason_and_their_events_on_demand(durable, desk):
    desk.made("P1", lost=True)
    desk.cases.ingest(Event("carrier", "P9", "scanned", {"place": "Oslo"}))
    desk.cases.ingest(Event("carrier", "P1", "scanned", {"place": "Rome"}))
    plain = durable("cases", "dead-letters")
    assert "unrouted" in plain.stdout
    assert "Oslo" not in plain.output
    assert "Oslo" in durable("cases", "dead-letters", "--payload").stdout
    one = value_of(durable("cases", "dead-letters", "--reason", "step-not-available", "--json", "--payload"))
    assert [letter["event"]["payload"] for letter in one["dead_letters"]] == [{"place": "Rome"}]
    assert value_of(durable("cases", "dead-letters", "--system", "nobody", "--json"))["dead_letters"] == []


def test_find_knows_a_case_by_all_that_it_is_called(durable, desk, engine):
    case_id = desk.made("P-77")
    done = desk.cases.execute(case_id, "tell")
    ingested = desk.cases.ingest(Event("carrier", "P-77", "scanned", {"place": "Oslo"}))
    for name, by in (
        (case_id, "id"),
        (case_id[:9], "beginning of an id"),
        (done.execution_id, "execution"),
        (ingested.id, "event"),
        ("P-77", "external id"),
    ):
        found = value_of(durable("find", name, "--json"))["found"]
        assert [(one["what"], one["id"], one["by"]) for one in found] == [("case", case_id, by)]
        assert found[0]["look"] == f"durable cases show {case_id}"


def test_status_says_what_is_at_work_and_what_waits(durable, desk):
    assert "cases:" not in durable("status").stdout
    case_id = desk.made()
    desk.cases.ingest({"system": "carrier", "external_id": "P9", "type": "scanned"})
    shown = []
    desk.act = lambda state, ctx: shown.append(durable("status"))
    desk.cases.execute(case_id, "tell")
    assert "cases: 1 claimed, 0 of them lapsed; events: 0 pending, 1 dead letters" in shown[0].stdout
    counted = value_of(durable("status", "--json"))["cases"]
    assert counted == {"claimed": 0, "lapsed": 0, "pending_events": 0, "dead_letters": 1}


# --- with the code -------------------------------------------------------------------------------


def test_what_needs_the_code_says_so(durable, desk):
    case_id = desk.made()
    refused = durable("cases", "affordances", case_id, "--json")
    assert (refused.exit_code, error_of(refused)) == (2, "APP_NOT_LOADED")


def test_a_case_is_explained_executed_and_asked_again(proj, room, engine):
    case_id = room(items={"chair": False})
    listed = told(proj("cases", "affordances", case_id, "--actor", '{"name": "guard"}', "--json"))
    assert [(one["step"], one["scope_key"]) for one in listed["affordances"]] == [
        ("close", None), ("lift", "chair"), ("burn", None),
    ]  # fmt: skip
    nobody = told(proj("cases", "explain", case_id, "close", "--json"))
    assert (nobody["possible"], nobody["permitted"]) == (True, None)
    null = told(proj("cases", "explain", case_id, "close", "--actor", "null", "--json"))
    assert null["permitted"] is False

    refused = proj("cases", "execute", case_id, "close", "--actor", '{"name": "eve"}', "--json")
    assert (refused.returncode, told(refused)["error"]["reason"]) == (5, "STEP_NOT_AVAILABLE")
    done = proj("cases", "execute", case_id, "close", "--actor", '{"name": "guard"}', "--input", "-", "--json",
                input='{"text": "good night"}')  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert told(done)["seq"] == 1
    failed = proj("cases", "execute", case_id, "burn", "--actor", "null", "--json")
    assert (failed.returncode, told(failed)["error"]["reason"]) == (1, "EXECUTION_FAILED")
    assert "4711" not in failed.stdout + failed.stderr

    same = proj("cases", "replay", case_id, "--json")
    assert (same.returncode, told(same)["matching"]) == (0, 2)
    code = (proj.folder / "cases_proj.py").read_text()
    (proj.folder / "cases_proj.py").write_text(
        code.replace('return state.open or Unmet("it is closed")', "return False")
    )
    drifted = proj("cases", "replay", case_id)
    assert drifted.returncode == 6
    assert "open was met and is unmet" in drifted.stdout


def test_an_event_is_taken_in(proj, room):
    case_id = room(items={"chair": False})
    assert proj("cases", "execute", case_id, "close", "--actor", '{"name": "guard"}').returncode == 0
    event = {"system": "doors", "external_id": "D1", "type": "lifted", "scope_key": "chair"}
    (proj.folder / "event.json").write_text(json.dumps(event))
    done = proj("cases", "ingest", "@event.json", "--json")
    assert (done.returncode, told(done)["status"]) == (0, "executed"), done.stderr
    assert told(proj("cases", "ingest", json.dumps(event), "--json"))["status"] == "duplicate"
    dead = proj("cases", "ingest", json.dumps({**event, "external_id": "D2"}), "--json")
    assert (dead.returncode, told(dead)["reason"]) == (5, "unrouted")
    wrong = proj("cases", "ingest", "{}", "--json")
    assert (wrong.returncode, told(wrong)["error"]["reason"]) == (2, "INVALID_ARGUMENTS")


def test_cases_are_migrated_and_what_failed_is_taken_up(proj, room, engine):
    full, empty = room(items={"chair": True}), room()
    line = ("cases", "migrate", "room", "lamps", "--transform", "cases_proj:widened", "--json")
    asked = proj(*line)
    assert (asked.returncode, told(asked)["error"]["reason"]) == (2, "USAGE")
    dry = told(proj(*line, "--dry-run"))
    assert (dry["changed"], len(dry["failed"]), dry["dry_run"]) == (1, 1, True)
    done = proj(*line, "--yes")
    assert done.returncode == 5
    assert [one["case_id"] for one in told(done)["failed"]] == [empty]
    again = told(proj(*line, "--yes", "--id", full))
    assert again["scanned"] == 0
    assert told(proj("cases", "show", full, "--state", "--json"))["state"]["items"] == {"chair": True, "lamp": False}
    assert proj("cases", "migrate", "room", "x", "--transform", "cases_proj:nothing", "--yes").returncode == 2
