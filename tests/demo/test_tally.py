"""The demo's checker can fail: whatever is planted, it reports, and the exit code is 1."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from durable_core.deliveries.attempt import Worker, perform
from durable_core.demo import run as demo
from durable_core.demo import shop as example
from durable_core.demo.plan import Played
from durable_core.demo.report import Outcome
from durable_core.demo.supplier import Restocked
from durable_core.demo.tally import Call, Evidence, Tally, counted, json_lines
from durable_core.plans.rows import Report
from durable_core.states import PlanState
from tests.sinks import Mailbox, Receiver, http_server, mail_server

FAULTS = {"orders": 2, "kills": 1, "freezes": 1, "flushes": 1, "rolled_back": 0, "duplicates": 0}


def row(row_id: str, kind: str, state: str = "sent", **more: Any) -> dict[str, Any]:
    return {"id": row_id, "kind": kind, "state": state, "fence": 1, "settled_fence": 1, "xid": 7, "error_code": None,
            **more}  # fmt: skip


def kept() -> Evidence:
    """Two orders, everything as promised."""
    orders = [{"number": n, "email": f"e{n}", "webhook": f"w{n}"} for n in (1, 2)]
    rows = [row(f"e{n}", example.EMAIL) for n in (1, 2)] + [row(f"w{n}", example.WEBHOOK) for n in (1, 2)]
    return Evidence(
        orders=list(orders), deliveries=list(rows),
        effects=[{"delivery_id": r["id"], "fence": 1, "xid": 7} for r in rows], journal=[],
        calls=[Call(c, n, example.expected_key(c, f"{c[0]}{n}")) for c in ("email", "webhook") for n in (1, 2)],
        events=Counter(), placed=[1, 2],
    )  # fmt: skip


def outcome(tally: Tally, drained: bool = True) -> Outcome:
    return Outcome(tally, FAULTS, 1.0, 1, drained)


def test_what_was_kept_exits_0() -> None:
    tally = counted(kept())
    assert (tally.accepted, tally.sent, tally.broken) == (4, 4, {})
    assert demo.exit_code(outcome(tally)) == 0
    assert "Nothing was lost" in outcome(tally).verdict


def test_a_plan_that_came_to_something_else_is_seen() -> None:
    report = Report("p", PlanState.EXECUTED, None, None, False, ())
    for broken, code in ((None, 0), ("the prices are wrong", 1)):
        whole = Outcome(counted(kept()), FAULTS, 1.0, 1, True, Played(report, report, broken))
        assert demo.exit_code(whole) == code
        assert (whole.verdict == "BROKEN: the prices are wrong") is bool(code)


def lose_a_row(e: Evidence) -> None:
    del e.deliveries[0]


def leave_a_row_open(e: Evidence) -> None:
    e.deliveries[0] = row("e1", example.EMAIL, "pending")


def lose_a_call(e: Evidence) -> None:
    e.calls.pop()


def lose_a_committed_order(e: Evidence) -> None:
    e.placed.append(3)


def fail_a_row_without_its_call(e: Evidence) -> None:
    e.deliveries[0] = row("e1", example.EMAIL, "failed")
    e.calls = [call for call in e.calls if (call.channel, call.order) != ("email", 1)]
    e.effects = e.effects[1:]


def double_an_effect(e: Evidence) -> None:
    e.effects.append(e.effects[0])


def lose_an_effect(e: Evidence) -> None:
    e.effects.pop()


def let_a_stale_owner_write(e: Evidence) -> None:
    e.deliveries[0] = row("e1", example.EMAIL, settled_fence=2)


def let_an_effect_commit_on_its_own(e: Evidence) -> None:
    e.deliveries[0] = row("e1", example.EMAIL, xid=8)


def keep_a_rolled_back_row(e: Evidence) -> None:
    e.deliveries.append(row("e9", example.EMAIL))


def call_for_a_rolled_back_order(e: Evidence) -> None:
    e.calls.append(Call("webhook", example.FIRST_ROLLED_BACK + 1, "k"))


def change_the_key_of_a_repeat(e: Evidence) -> None:
    e.calls.append(Call("email", 1, "<another@shop.example>"))


@pytest.mark.parametrize(
    ("plant", "reported"),
    [
        (lose_a_row, {"lost": 1}),
        (leave_a_row_open, {"lost": 1}),
        (lose_a_call, {"lost": 1, "missing_calls": 1}),
        (lose_a_committed_order, {"lost": 2}),
        (fail_a_row_without_its_call, {"missing_calls": 1}),
        (double_an_effect, {"doubled_database_effects": 1}),
        (lose_an_effect, {"lost_database_effects": 1}),
        (let_a_stale_owner_write, {"effects_apart_from_receipt": 1}),
        (let_an_effect_commit_on_its_own, {"effects_apart_from_receipt": 1}),
        (keep_a_rolled_back_row, {"phantoms": 1}),
        (call_for_a_rolled_back_order, {"phantoms": 1}),
        (change_the_key_of_a_repeat, {"calls_with_another_key": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_is_planted_is_reported(plant: Callable[[Evidence], None], reported: dict[str, int]) -> None:
    evidence = kept()
    plant(evidence)
    found = outcome(counted(evidence))
    assert found.tally.broken == reported
    assert demo.exit_code(found) == 1
    assert found.verdict.startswith("BROKEN")
    assert json.loads(found.as_json())["kept"] is False


def test_a_repeated_call_under_its_key_is_reported_and_allowed() -> None:
    evidence = kept()
    evidence.calls.append(evidence.calls[0])
    tally = counted(evidence)
    assert (tally.doubled_external_calls, tally.broken) == (1, {})


def test_a_run_that_does_not_finish_exits_1() -> None:
    assert demo.exit_code(outcome(counted(kept()), drained=False)) == 1


def test_rescues_retries_and_refusals_are_counted_from_journal_and_logs() -> None:
    evidence = kept()
    evidence.journal = [
        {"row_id": row_id, "move": move, "to_state": state}
        for row_id, move, state in (
            ("e1", "reap", "pending"), ("e1", "release", "pending"), ("w1", "fail", "pending"),
            ("w1", "fail late", "dead"),
        )
    ]  # fmt: skip
    evidence.events["stale_write_refused"] = 3
    tally = counted(evidence)
    assert (tally.rescued, tally.retried, tally.refused_stale_writes) == (1, 1, 3)


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"event": "a"}\nplain text\n{"event": "b"}\n{"event": "c')
    assert [line["event"] for line in json_lines(tmp_path / "log")] == ["a", "b"]
    assert json_lines(tmp_path / "none") == []


# --- the same against real rows ------------------------------------------------------------------


@pytest.fixture(scope="module")
def sinks() -> Iterator[tuple[Mailbox, Receiver, example.Kinds]]:
    with mail_server() as mailbox, http_server() as receiver:
        place = example.Place("", "", mailbox.port, int(receiver.url.rpartition(":")[2]))
        yield mailbox, receiver, example.declare(place)
    example.forget()


@pytest.fixture
def shop(engine: Engine, sinks: Any) -> Iterator[Any]:
    """The shop in the test's database, with real sinks that keep what they get in memory."""
    mailbox, receiver, kinds = sinks
    mailbox.messages.clear()
    receiver.calls.clear()
    example.prepare(engine)
    yield example.Shop(engine, kinds), mailbox, receiver
    with engine.begin() as connection:
        connection.execute(text("drop schema shop cascade"))


def gathered(engine: Engine, shop: example.Shop, mailbox: Any, receiver: Receiver, folder: Path) -> Evidence:
    lines = [
        {"channel": "email", "order": int(m["Subject"].split()[1]), "key": m["Message-ID"]} for m in mailbox.messages
    ] + [
        {"channel": "webhook", "order": json.loads(c.body)["order"], "key": c.headers["idempotency-key"]}
        for c in receiver.calls
    ]
    (folder / "calls").write_text("\n".join(json.dumps(line) for line in lines))
    with engine.connect() as connection:
        return Evidence.gathered(connection, [folder / "calls"], [], shop.placed)


def worked_off(engine: Engine, shop: example.Shop, worker: Worker) -> None:
    with engine.connect() as connection:
        rows = connection.execute(text("select id::text, kind from durable.deliveries where state = 'pending'")).all()
    for row_id, kind in rows:
        perform(worker, shop.kinds.email if kind == example.EMAIL else shop.kinds.webhook, row_id)


def test_real_rows_are_read_as_they_are(shop: Any, engine: Engine, worker: Worker, tmp_path: Path) -> None:
    shop, mailbox, receiver = shop
    for number in (1, 2):
        shop.order(number)
    shop.order(example.FIRST_ROLLED_BACK, roll_back=True)
    shop.order_again(1)
    worked_off(engine, shop, worker)

    tally = counted(gathered(engine, shop, mailbox, receiver, tmp_path))

    assert (tally.accepted, tally.sent, tally.broken) == (4, 4, {})
    assert (shop.placed, shop.duplicates, shop.created_twice) == ([1, 2], 2, 0)
    assert shop.rolled_back == [example.FIRST_ROLLED_BACK]


@pytest.mark.parametrize(
    ("sql", "reported"),
    [
        ("insert into shop.effects (delivery_id, fence, channel, order_number) "
         "select delivery_id, fence, channel, order_number from shop.effects limit 1",
         {"doubled_database_effects": 1, "effects_apart_from_receipt": 1}),
        ("delete from durable.deliveries where id in (select id from durable.deliveries limit 1)", {"lost": 1}),
        ("delete from shop.effects where id in (select id from shop.effects limit 1)", {"lost_database_effects": 1}),
    ],
)  # fmt: skip
def test_what_is_planted_in_real_rows_is_found(
    sql: str, reported: dict[str, int], shop: Any, engine: Engine, worker: Worker, tmp_path: Path
) -> None:
    shop, mailbox, receiver = shop
    shop.order(1)
    worked_off(engine, shop, worker)
    with engine.begin() as connection:
        connection.execute(text(sql))
    found = outcome(counted(gathered(engine, shop, mailbox, receiver, tmp_path)))
    assert found.tally.broken == reported
    assert demo.exit_code(found) == 1


def test_a_database_in_use_is_left_alone(engine: Engine, make: Callable[..., Any]) -> None:
    made = make()
    with pytest.raises(example.DatabaseInUse, match="not the demo's"):
        example.prepare(engine)
    with engine.connect() as connection:
        assert connection.execute(
            text("select count(*) from durable.deliveries where id = :id"), {"id": made.id}
        ).scalar()
        assert connection.execute(text("select to_regclass('shop.orders')")).scalar() is None


@pytest.mark.parametrize(
    ("state", "code", "issued", "kept"),
    [
        ("succeeded", None, 1, True), ("failed", "OUTCOME_UNKNOWN", 0, True), ("failed", "OUTCOME_UNKNOWN", 1, True),
        ("succeeded", None, 2, False), ("failed", "OUTCOME_UNKNOWN", 2, False), ("failed", "PATIENCE_OVER", 1, False),
        ("running", None, 1, False),
    ],
)  # fmt: skip
def test_an_operation_is_kept_that_was_issued_once_at_most_and_says_what_it_knows(state, code, issued, kept):
    restocked = Restocked(state, code, issued, polled=3, supplier_killed=True)
    found = Outcome(Tally(), FAULTS, 1.0, 1, drained=True, restocked=restocked)
    assert (restocked.kept, found.kept, json.loads(found.as_json())["operation"]["kept"]) == (kept, kept, kept)
    assert ("BROKEN: the operation" in found.verdict) is not kept
