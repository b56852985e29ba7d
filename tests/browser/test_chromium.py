"""
The browser session in a real Chromium, against the real router on a real Postgres: the page of `examples/notes`.

NOTES_PICTURES=docs/images makes the picture of docs/howto/documents-browser.md anew, by the same walk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Route, expect, sync_playwright
from sqlalchemy import Engine

from durable_core import Documents
from durable_core.plans.target import forget_reader
from tests.browser.board import NEVER, SAVES, Board, Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LARGE = "x" * 70_000

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH"),
    # One browser and one server for all of them.
    pytest.mark.serial,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def server(test_database: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(test_database, tmp_path_factory.mktemp("notes") / "server.log")
    made.start()
    yield made
    made.kill()


@pytest.fixture
def board(engine: Engine, server: Server) -> Iterator[Board]:
    yield Board(engine, server, Documents("board"))
    forget_reader("board")


@pytest.fixture
def person(browser: Browser, server: Server) -> Iterator[Callable[[str], BrowserContext]]:
    """A person at a browser of their own, signed in: `person("dana")`. A script that breaks fails the test."""
    made: list[BrowserContext] = []
    broken: list[str] = []

    def _person(name: str) -> BrowserContext:
        context = browser.new_context(locale="en-GB", viewport={"width": 720, "height": 420})
        context.on("weberror", lambda failed: broken.append(str(failed.error)))
        sign_in(context, server, name)
        made.append(context)
        return context

    yield _person
    for context in made:
        context.close()
    assert broken == []


@pytest.fixture
def dana(person: Callable[[str], BrowserContext]) -> BrowserContext:
    return person("dana")


def sign_in(context: BrowserContext, server: Server, name: str) -> None:
    assert context.request.post(f"{server.url}/sign-in", data={"name": name}).status == 204


# --- losing nothing -------------------------------------------------------------------------------


def test_what_is_typed_is_saved_once_and_the_status_says_so(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    page.write("Oat milk")
    page.says("clean", "All changes saved")
    board.once_at(1)
    assert board.texts() == ["Oat milk", "Bread"]
    assert page.drafts() == []


def test_typed_and_reloaded_at_once_the_text_is_offered(board: Board, dana: BrowserContext) -> None:
    """The save of the page before is still on its way; restored, the text is that very save, and no second version."""
    page = board.open(dana, NEVER)
    with board.held():
        page.write("Oat milk")
        page.once_drafted("Oat milk")
        page.page.reload()
        board.once_waited_for()
        page.shows("Milk", "Bread")
        expect(page.offer).to_be_visible()
    page.offer.click()
    page.shows("Oat milk", "Bread")
    page.page.close()
    board.once_at(1)
    board.is_a_chain()


@pytest.mark.spec("documents", 25)
def test_an_answer_lost_after_the_commit_is_one_version(board: Board, dana: BrowserContext) -> None:
    """K22: the repeat is answered by the id of the save."""
    page = board.open(dana)
    sent: list[str] = []
    answered: list[tuple[int, bool | None]] = []

    def lose_the_first(route: Route) -> None:
        if route.request.method != "POST":
            return route.continue_()
        sent.append(route.request.post_data_json["save_id"])
        answer = route.fetch()
        answered.append((answer.status, answer.json().get("repeated")))
        if len(sent) == 1:
            return route.abort()
        return route.fulfill(response=answer)

    page.page.route(SAVES, lose_the_first)
    page.write("Oat milk")
    page.says("retrying")
    board.once_at(1)
    page.press("Retry now")
    page.says("clean")
    assert (answered, len(set(sent))) == ([(201, False), (200, True)], 1)
    assert board.version() == 1
    board.is_a_chain()


def test_a_server_that_is_down_gets_the_text_once_it_is_back(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    board.server.kill()
    page.write("Oat milk")
    page.says("retrying", "Your text is kept")
    page.write("Oat milk, two")
    page.once_drafted("Oat milk, two")
    board.server.start()
    page.press("Retry now")
    page.says("clean")
    assert board.texts() == ["Oat milk, two", "Bread"]


def test_a_server_killed_within_a_save_is_asked_again(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    with board.held():
        page.write("Oat milk")
        board.once_waited_for()
        board.server.kill()
        page.says("retrying")
    board.server.start()
    page.press("Retry now")
    page.says("clean")
    assert board.texts() == ["Oat milk", "Bread"]
    assert board.version() == 1  # the database ended what the dead server had begun
    board.is_a_chain()


def test_signed_out_midway_the_text_is_kept_until_one_signs_in_again(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    dana.clear_cookies()
    page.write("Oat milk")
    page.says("blocked", "Signed out. Your text is kept")
    assert board.version() == 0
    page.once_drafted("Oat milk")

    page.press("Sign in")
    page.says("clean")
    assert board.texts() == ["Oat milk", "Bread"]


def test_a_tab_closed_before_the_save_saves_on_its_way_out(board: Board, dana: BrowserContext) -> None:
    """All of the browser's connections to the server are taken, so the page is gone before its request leaves."""
    page = board.open(dana, NEVER)
    with board.server.stopped():
        page.take_all_connections()
        page.write("Oat milk")
        page.page.close()
    board.once_at(1)
    assert board.texts() == ["Oat milk", "Bread"]

    again = board.open(dana)
    again.shows("Oat milk", "Bread")
    again.says("clean")
    expect(again.offer).to_have_count(0)


@pytest.mark.spec("documents", 26)
def test_what_a_crashed_page_had_not_saved_is_offered_and_not_applied(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana, NEVER)
    page.write("Oat milk")
    page.once_drafted("Oat milk")
    page.crash()

    again = board.open(dana)
    again.shows("Milk", "Bread")
    assert board.version() == 0
    again.offer.click()
    again.shows("Oat milk", "Bread")
    again.says("clean")
    assert board.texts() == ["Oat milk", "Bread"]


@pytest.mark.spec("documents", 15)
def test_a_full_disk_is_told_and_the_save_goes_through(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana, NEVER)
    full = {"origin": board.server.url, "quotaSize": 1}
    dana.new_cdp_session(page.page).send("Storage.overrideQuotaForOrigin", full)
    page.write("Oat milk")
    page.says("dirty", "No copy is kept")
    page.page.close()
    board.once_at(1)


def test_a_text_too_large_to_outlive_the_page_is_offered_next_time(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana, NEVER)
    page.write(LARGE)
    page.once_drafted(LARGE)
    board.server.kill()  # else it may win the race with the end of the page
    page.page.close()
    board.server.start()

    again = board.open(dana)
    again.shows("Milk", "Bread")
    again.offer.click()
    again.says("clean")
    assert board.texts() == [LARGE, "Bread"]


# --- conflicts ------------------------------------------------------------------------------------


@pytest.mark.spec("documents", 8)
@pytest.mark.spec("documents", 22)
def test_of_two_people_the_second_is_told_and_puts_theirs_on_top(
    board: Board, person: Callable[[str], BrowserContext], tmp_path: Path
) -> None:
    dana, sam = board.open(person("dana")), board.open(person("sam"))
    sam.write("Rye bread", note=1)
    sam.says("clean")
    dana.write("Oat milk")
    dana.says("conflict", "sam saved a newer version")
    dana.write("Oat milk, two")
    dana.once_drafted("Oat milk, two")
    dana.says("conflict")
    assert (board.version(), board.texts()) == (1, ["Milk", "Rye bread"])
    picture = Path(os.environ.get("NOTES_PICTURES", tmp_path)) / "documents-conflict.png"
    dana.page.screenshot(path=picture, animations="disabled")
    assert 5_000 < picture.stat().st_size < 60_000

    dana.press("Put mine on top")
    dana.says("clean")
    dana.shows("Oat milk, two", "Rye bread")
    assert (board.version(), board.texts()) == (2, ["Oat milk, two", "Rye bread"])
    board.is_a_chain()


@pytest.mark.spec("documents", 22)
def test_long_offline_and_back_the_person_decides(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    dana.set_offline(True)
    page.write("Oat milk")
    page.says("offline", "Your text is kept")
    for said in ("Bread", "Rye bread", "Rye bread, sliced"):
        board.save({"bread": said})
    dana.set_offline(False)
    page.says("conflict")
    assert board.version() == 3

    page.press("Put mine on top")
    page.says("clean")
    assert (board.version(), board.texts()) == (4, ["Oat milk", "Rye bread, sliced"])


def test_the_person_may_give_way(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    board.save({"milk": "Goat milk"})
    page.write("Oat milk")
    page.says("conflict")
    page.press("Use theirs")
    page.says("clean")
    page.shows("Goat milk", "Bread")
    assert (board.version(), page.drafts()) == (1, [])


def test_an_assistants_delivery_meets_the_same_check(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    with page.page.expect_response("**/suggestions") as asked:
        page.press("Ask the assistant")
    assert asked.value.status == 202
    assert board.server.carry_out().startswith("delivery notes.suggest sent")
    page.write("Oat milk")
    page.says("conflict", "assistant saved a newer version")
    page.press("Put mine on top")
    page.says("clean")
    page.shows("Oat milk", "Bread", "Suggestion: which of these 2 can wait?")
    assert board.texts() == ["Oat milk", "Bread", "Suggestion: which of these 2 can wait?"]


def test_an_assistant_that_thought_too_long_overwrites_nothing(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana)
    with page.page.expect_response("**/suggestions"):
        page.press("Ask the assistant")
    page.write("Oat milk")
    page.says("clean")
    board.once_at(1)
    assert board.server.carry_out().startswith("delivery notes.suggest sent")
    assert (board.version(), board.texts()) == (1, ["Oat milk", "Bread"])


# --- tabs and people ------------------------------------------------------------------------------


def test_a_second_tab_reads_until_it_takes_over_and_the_first_saves_before(board: Board, dana: BrowserContext) -> None:
    first = board.open(dana, NEVER)
    first.says("clean")
    second = board.open(dana)
    second.says("readonly_tab", "Open in another tab")
    expect(second.notes.first).not_to_be_editable()
    first.write("Oat milk")
    first.says("dirty")

    second.press("Edit here")
    second.says("clean")
    second.shows("Oat milk", "Bread")
    assert (board.version(), board.texts()) == (1, ["Oat milk", "Bread"])
    first.says("readonly_tab")

    second.write("Oat milk, two")
    second.says("clean")
    first.shows("Oat milk, two", "Bread")
    assert board.version() == 2


def test_signing_out_clears_the_drafts(board: Board, dana: BrowserContext) -> None:
    """A40."""
    page = board.open(dana)
    page.unreachable()
    page.write("Oat milk")
    page.says("retrying")
    page.once_drafted("Oat milk")
    page.page.on("dialog", lambda dialog: dialog.accept())
    page.press("Sign out")
    expect(page.page.get_by_role("button", name="Sign in as dana")).to_be_visible()
    assert page.drafts() == []
    assert dana.cookies() == []


@pytest.mark.spec("documents", 9)
def test_another_person_at_the_same_browser_sees_no_draft(board: Board, dana: BrowserContext) -> None:
    page = board.open(dana, NEVER)
    page.write("A present for Sam")
    page.once_drafted("A present for Sam")
    page.crash()

    sign_in(dana, board.server, "sam")
    other = board.open(dana)
    other.says("clean")
    other.write("Oat milk")
    other.says("clean")
    expect(other.offer).to_have_count(0)
    assert "A present for Sam" not in other.page.content()
    assert "A present for Sam" in json.dumps(other.drafts())
    other.page.close()

    sign_in(dana, board.server, "dana")
    own = board.open(dana)
    own.shows("Oat milk", "Bread")
    expect(own.offer).to_be_visible()
