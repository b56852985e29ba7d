import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core import Secret, enqueue_by_name
from durable_core.arguments import Signature
from durable_core.claims.journal import Line
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import DeliveryKind, Step
from durable_core.deliveries.read import Delivery
from durable_core.testing import Made, MovableClock
from tests.cli.conftest import DURABLE, error_of, process, value_of

Run = Callable[..., Result]
NOBODY = "01900000-0000-7000-8000-000000000000"


def test_a_page_is_newest_first_and_the_next_begins_after_it(durable: Run, make: Callable[..., Made]) -> None:
    made = [make().id for _ in range(3)]

    first = value_of(durable("deliveries", "list", "--limit", "2", "--json"))
    assert [row["id"] for row in first["deliveries"]] == made[:0:-1]
    second = value_of(durable("deliveries", "list", "--limit", "2", "--after", first["next_after"], "--json"))
    assert [row["id"] for row in second["deliveries"]] == made[:1]
    assert second["next_after"] is None


def test_filters_narrow_the_page(durable: Run, make: Callable[..., Made], declare: Callable[..., Any]) -> None:
    other = declare(name="other.kind")
    made = make(other, queue="mail", key="k[1]", state="dead")
    make()
    for line in (("--kind", "other.kind"), ("--queue", "mail"), ("--key", "k[1]"), ("--state", "dead")):
        found = value_of(durable("deliveries", "list", *line, "--json"))["deliveries"]
        assert [row["id"] for row in found] == [made.id], line
    assert durable("deliveries", "list", "--state", "lost").exit_code == 2
    assert durable("deliveries", "list", "--limit", "0").exit_code == 2


def test_a_list_in_a_pipe_is_never_cut(durable: Run, make: Callable[..., Made]) -> None:
    made = make(key="k" * 900)
    (line,) = durable("deliveries", "list").stdout.splitlines()[1:]
    assert made.id in line
    assert "k" * 900 in line


def test_a_secret_in_a_payload_is_not_shown_on_request_either(
    durable: Run, make: Callable[..., Made], declare: Callable[..., Any]
) -> None:
    """By its annotation where the kind is known here, else by its name."""

    def handler(step: Step, note: Secret[str]) -> None: ...

    def any_body(step: Step, body: Any) -> None: ...

    made = make(declare(name="secret.kind", handler=handler), arguments={"note": "hunter2"})
    with_name = make(declare(any_body), arguments={"body": {"api_key": "hunter2"}})
    for row_id in (made.id, with_name.id):
        for line in ((), ("--json",)):
            shown = durable("deliveries", "show", row_id, "--arguments", *line).stdout
            assert "hunter2" not in shown
            assert "***" in shown


def test_payloads_are_shown_only_on_request(durable: Run, make: Callable[..., Made]) -> None:
    made = make(arguments={"n": 4711})
    assert "4711" not in durable("deliveries", "list", "--json").stdout
    assert "4711" not in durable("deliveries", "show", made.id, "--json").stdout
    assert "4711" not in durable("deliveries", "show", made.id).stdout
    assert value_of(durable("deliveries", "show", made.id, "--arguments", "--json"))["arguments"] == {"n": 4711}
    assert "4711" in durable("deliveries", "show", made.id, "--arguments").stdout


def test_show_says_how_far_it_came_why_it_waits_and_what_happened(
    durable: Run, declare: Callable[..., DeliveryKind[..., Any]], make: Callable[..., Made], worker: Worker
) -> None:
    def fails(step: Step) -> None:
        raise RuntimeError("the printer is on fire")

    kind = declare(fails)
    made = make(kind)
    perform(worker, kind, made.id)

    seen = value_of(durable("deliveries", "show", made.id, "--json"))
    assert seen["attempts_used"] == "1 of 5"
    assert seen["why"].startswith("its last attempt ended with WORKER_ERROR; the next is due in")
    assert "the printer is on fire" in seen["error_message"]
    assert [line["move"] for line in seen["journal"]] == ["fail"]
    assert seen["journal"][0]["at"].endswith("Z")

    told = durable("deliveries", "show", made.id).stdout
    for part in ("1 of 5", "its last attempt ended", "RuntimeError: the printer is on fire", "pending"):
        assert part in told


def test_of_a_long_history_the_newest_lines_are_shown_and_the_way_to_the_others_is_said(
    durable: Run, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(countdown=60)
    for seconds in ("60", "70", "80"):
        moved = durable("deliveries", "reschedule", made.id, "--in", seconds, *SAID, "--yes")
        assert moved.exit_code == 0, moved.stderr
    assert value_of(durable("deliveries", "show", made.id, "--json"))["journal_complete"] is True
    assert "older lines" not in durable("deliveries", "show", made.id).stderr
    monkeypatch.setattr("durable_core.cli.deliveries.JOURNAL_LINES", 2)
    seen = value_of(durable("deliveries", "show", made.id, "--json"))
    assert (len(seen["journal"]), seen["journal_complete"]) == (2, False)
    after = seen["journal"][0]["seq"]
    assert f"older lines: `durable journal {made.id} --after {after}`" in durable("deliveries", "show", made.id).stderr
    (oldest,) = value_of(durable("journal", made.id, "--after", str(after), "--json"))["lines"]
    assert oldest["seq"] < after


@pytest.mark.parametrize("state", ["sent", "failed", "dead", "canceled", "expired", "processing", "pending"])
def test_every_state_has_its_sentence(durable: Run, make: Callable[..., Made], state: str) -> None:
    seen = value_of(durable("deliveries", "show", make(state=state).id, "--json"))
    assert seen["state"] == state
    assert seen["why"].endswith(".")


@pytest.fixture
def hold(engine: Engine) -> Callable[[str], None]:
    """Hold a row back, as a sweep does that failed on it."""

    def _hold(row_id: str) -> None:
        with engine.begin() as connection:
            held = text("update durable.deliveries set held_reason = 'P0001: stumbled' where id = cast(:id as uuid)")
            connection.execute(held, {"id": row_id})

    return _hold


@pytest.mark.parametrize("state", ["pending", "processing"])
def test_a_held_row_says_that_first_and_how_it_is_released(
    durable: Run, make: Callable[..., Made], hold: Callable[[str], None], clock: MovableClock, state: str
) -> None:
    made = make(state=state)
    hold(made.id)
    clock.advance(seconds=40)  # lapsed or due: neither is what it waits for

    seen = value_of(durable("deliveries", "show", made.id, "--json"))
    assert seen["why"] == (
        "held back by a sweep that failed on it (P0001: stumbled); "
        f"release it with `durable deliveries release {made.id}`."
    )
    told = durable("deliveries", "show", made.id).stdout.splitlines()
    assert [line.split(None, 1)[1] for line in told if line.startswith("held")] == ["P0001: stumbled"]


def test_a_row_that_ended_tells_its_end_though_it_was_held(
    durable: Run, make: Callable[..., Made], hold: Callable[[str], None]
) -> None:
    made = make(state="sent")
    hold(made.id)
    assert value_of(durable("deliveries", "show", made.id, "--json"))["why"].startswith("done")


def test_a_row_whose_arguments_do_not_fit_says_what_to_deploy(
    durable: Run, declare: Callable[..., DeliveryKind[..., Any]], worker: Worker, engine: Engine
) -> None:
    def takes_a_name(step: Step, name: str) -> None: ...

    kind = declare(takes_a_name)
    with engine.begin() as connection:
        made = enqueue_by_name(connection, kind.name, {"name": "Ann"})
    kind.signature = Signature(kind.name, lambda step: None)
    perform(worker, kind, made.id)

    why = value_of(durable("deliveries", "show", made.id, "--json"))["why"]
    assert why.startswith("its arguments do not fit")
    assert "deploy the code that fits" in why


def test_a_lapsed_lease_and_a_row_not_yet_due_say_so(
    durable: Run, make: Callable[..., Made], clock: MovableClock
) -> None:
    held, later = make(state="processing"), make(countdown=7200)
    clock.advance(seconds=40)
    assert "lease lapsed" in value_of(durable("deliveries", "show", held.id, "--json"))["why"]
    assert "not due before 1h 59m" in value_of(durable("deliveries", "show", later.id, "--json"))["why"]


@pytest.mark.parametrize("row_id", [NOBODY, "41", "%s"])
def test_an_id_that_names_nothing_is_not_found(durable: Run, row_id: str) -> None:
    result = durable("deliveries", "show", row_id, "--json")
    assert (result.exit_code, error_of(result)) == (4, "NOT_FOUND")


# --- redrive -----------------------------------------------------------------------------------------

SAID = ("--by", "dana", "--reason", "the printer is back")


def test_a_redrive_records_who_and_why_and_reports_each_row(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery], lines: Callable[[str], list[Line]]
) -> None:
    dead, failed = make(state="dead"), make(state="failed")

    result = durable("deliveries", "redrive", dead.id, failed.id, *SAID, "--yes", "--json")

    assert result.exit_code == 0, result.stderr
    assert [one["outcome"] for one in value_of(result)["deliveries"]] == ["redriven", "redriven"]
    for made in (dead, failed):
        assert row(made.id).state == "pending"
        last = lines(made.id)[-1]
        assert (last.move, last.by, last.reason) == ("redrive", "dana", "the printer is back")


def test_a_refused_row_is_a_conflict_and_does_not_keep_the_others_back(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery]
) -> None:
    dead, sent = make(state="dead"), make(state="sent")

    result = durable("deliveries", "redrive", sent.id, dead.id, NOBODY, *SAID, "--yes", "--json")

    assert result.exit_code == 5
    outcomes = {one["id"]: one["outcome"] for one in value_of(result)["deliveries"]}
    assert outcomes == {sent.id: "refused", dead.id: "redriven", NOBODY: "not found"}
    assert row(dead.id).state == "pending"
    assert row(sent.id).state == "sent"


def test_an_unknown_row_is_not_found(durable: Run, make: Callable[..., Made]) -> None:
    assert durable("deliveries", "redrive", make(state="dead").id, NOBODY, "x", *SAID, "--yes").exit_code == 4


def test_the_same_id_twice_is_one_redrive(durable: Run, make: Callable[..., Made]) -> None:
    dead = make(state="dead")
    result = durable("deliveries", "redrive", dead.id, dead.id.upper(), *SAID, "--yes", "--json")
    assert [one["outcome"] for one in value_of(result)["deliveries"]] == ["redriven"]


def test_a_dry_run_foresees_and_changes_nothing(
    durable: Run, make: Callable[..., Made], row: Callable[[str], Delivery]
) -> None:
    dead, sent = make(state="dead"), make(state="sent")
    result = durable("deliveries", "redrive", dead.id, sent.id, *SAID, "--dry-run", "--json")
    assert result.exit_code == 5
    outcomes = {one["id"]: one["outcome"] for one in value_of(result)["deliveries"]}
    assert outcomes == {dead.id: "would be redriven", sent.id: "refused"}
    assert row(dead.id).state == "dead"


@pytest.mark.parametrize("act", ["redrive", "release"])
@pytest.mark.parametrize("line", [("--by", "dana"), ("--reason", "why"), ("--by", " ", "--reason", "why")])
def test_who_and_why_are_required(durable: Run, act: str, line: tuple[str, ...]) -> None:
    assert durable("deliveries", act, NOBODY, *line, "--yes").exit_code == 2


def test_a_release_lets_go_of_held_rows_alone_and_records_who_and_why(
    durable: Run, make: Callable[..., Made], hold: Callable[[str], None], row: Callable[[str], Delivery],
    lines: Callable[[str], list[Line]],
) -> None:  # fmt: skip
    held, free = make(), make()
    hold(held.id)

    foreseen = durable("deliveries", "release", held.id, free.id, *SAID, "--dry-run", "--json")
    assert row(held.id).held_reason is not None
    result = durable("deliveries", "release", held.id, free.id, NOBODY, *SAID, "--yes", "--json")

    assert (foreseen.exit_code, result.exit_code) == (5, 5)
    outcomes = {one["id"]: one["outcome"] for one in value_of(result)["deliveries"]}
    assert outcomes == {held.id: "released", free.id: "refused", NOBODY: "not found"}
    assert {one["id"]: one["outcome"] for one in value_of(foreseen)["deliveries"]} == {
        held.id: "would be released", free.id: "refused",
    }  # fmt: skip
    assert (row(held.id).state, row(held.id).held_reason) == ("pending", None)
    last = lines(held.id)[-1]
    assert (last.move, last.by, last.reason) == ("unhold", "dana", "the printer is back")


def test_a_row_that_somebody_is_at_work_on_is_refused_and_not_waited_for(
    durable: Run, make: Callable[..., Made], other_engine: Engine
) -> None:
    busy, dead = make(state="dead"), make(state="dead")
    with other_engine.begin() as connection:
        connection.execute(
            text("select from durable.deliveries where id = cast(:id as uuid) for update"), {"id": busy.id}
        )
        result = durable("deliveries", "redrive", busy.id, dead.id, *SAID, "--yes", "--json")
    assert result.exit_code == 5
    outcomes = {one["id"]: (one["outcome"], one["message"] or "") for one in value_of(result)["deliveries"]}
    assert outcomes[dead.id] == ("redriven", "")
    assert outcomes[busy.id][0] == "refused"
    assert "at work on it" in outcomes[busy.id][1]


def test_what_is_foreseen_is_refused_in_the_words_of_the_act_itself(durable: Run, make: Callable[..., Made]) -> None:
    made = make()
    for act in ("redrive", "release"):
        foreseen, done = (
            value_of(durable("deliveries", act, made.id, *SAID, how, "--json"))["deliveries"]
            for how in ("--dry-run", "--yes")
        )
        assert foreseen == done


def test_without_a_terminal_it_does_not_ask(engine: Engine, make: Callable[..., Made]) -> None:
    url = engine.url.render_as_string(hide_password=False)
    done = process(
        "--database-url", url, "deliveries", "redrive", make(state="dead").id, *SAID, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert "--yes" in done.stderr


def _type(leader: int, answer: str, child: subprocess.Popen[str]) -> None:
    """As a person would: Ctrl-C again where one fell between Python's look for signals and its wait for a key."""
    for _ in range(6):
        os.write(leader, answer.encode() + (b"" if answer == "\x03" else b"\n"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=5 if answer == "\x03" else 30)
            return
    raise AssertionError("the command did not end")


def _on_a_terminal_of_its_own() -> None:
    """Ctrl-C is typed on the child's own terminal, and heard there though whoever runs the tests ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("answer", "code", "state"), [("y", 0, "pending"), ("n", 130, "dead"), ("\x03", 130, "dead")])
def test_on_a_terminal_it_asks(
    engine: Engine, make: Callable[..., Made], row: Callable[[str], Delivery], answer: str, code: int, state: str
) -> None:
    dead = make(state="dead")
    url = engine.url.render_as_string(hide_password=False)
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*DURABLE, "--database-url", url, "deliveries", "redrive", dead.id, *SAID],
        stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=_on_a_terminal_of_its_own,
    ) as child:  # fmt: skip
        os.close(follower)
        assert child.stderr is not None
        asked = ""
        while "?" not in asked:
            asked += child.stderr.read(1)
        assert dead.id in asked
        _type(leader, answer, child)
    os.close(leader)
    assert child.returncode == code
    assert row(dead.id).state == state
