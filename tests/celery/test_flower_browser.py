"""
Flower's pages in a real Chromium, as a person on call finds a delivery: on a phone, from the list to its page.

FLOWER_PICTURES=docs/images makes the pictures of docs/flower.md anew, by the same walk.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from durable_core import deliveries
from tests.celery.flower import Flower, started
from tests.celery.nodes import Broker
from tests.celery.shop import Shop
from tests.celery.world import World

CHROMIUM = shutil.which("chromium")
PHONE = ViewportSize(width=390, height=844)
DESK = ViewportSize(width=1440, height=560)
SECONDS = 30_000.0

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine's PATH")


@pytest.fixture(scope="module")
def flower(
    shop_environment: dict[str, str], celery_broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flower]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLOWER_", "DURABLE_"))}
    environment = {**kept, **shop_environment, "CELERY_BROKER_URL": celery_broker.url}
    with started(tmp_path_factory.mktemp("flower"), environment) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test when a script on it does."""
    shown = browser.new_page(viewport=PHONE)
    shown.set_default_timeout(SECONDS)
    broken: list[str] = []
    shown.on("pageerror", lambda error: broken.append(str(error)))
    yield shown
    shown.close()
    assert broken == []


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get("FLOWER_PICTURES", tmp_path))


def picture(page: Page, path: Path, size: ViewportSize) -> None:
    page.set_viewport_size(size)
    page.screenshot(path=path, animations="disabled")
    assert path.stat().st_size > 10_000


def test_from_the_search_box_to_the_delivery_and_the_one_before_it(
    world: World, shop_kinds: Shop, flower: Flower, page: Page, pictures: Path
) -> None:
    flower.hears()
    row_id = world.commit_for_its_own_hint(shop_kinds.retried, "done")
    world.sent(row_id)
    refused = world.commit(shop_kinds.hopeless, "nobody@example.org")
    world.finished(refused)
    flower.ended(row_id, "RETRY", "SUCCESS")
    flower.ended(refused, "FAILURE")

    page.goto(f"{flower.url}/tasks")
    page.set_viewport_size(DESK)
    page.locator("input[type=search]").fill("shop.")
    expect(page.locator("#tasks-table tbody tr")).to_have_count(3)
    picture(page, pictures / "flower-tasks.png", DESK)
    page.locator("input[type=search]").fill(row_id)
    expect(page.locator("#tasks-table tbody tr")).to_have_count(2)
    expect(page.locator("#tasks-table tbody")).to_contain_text(f"attempt 2 of shop.retried {row_id}")

    page.set_viewport_size(PHONE)
    page.locator(f'#tasks-table a[href="/task/{row_id}"]').first.click()
    page.locator("#delivery-link").click()
    expect(page).to_have_url(re.compile(f"/delivery/{row_id}$"))
    expect(page.locator("#delivery-state")).to_have_text("sent")
    expect(page.locator("#delivery-journal tbody tr")).to_have_count(1)
    assert_it_fits(page)


def test_a_delivery_that_waits_leads_to_the_one_it_waits_for(
    world: World, shop_kinds: Shop, flower: Flower, page: Page, pictures: Path
) -> None:
    ahead = world.prepare(shop_kinds.order, queue="unread", ordering_key="order:41")
    with world.engine.begin() as connection:
        # Handlers begin lines in order; here the first has begun, and asked to be run again later.
        connection.exec_driver_sql(f"update durable.deliveries set attempts = 1, snoozes = 1 where id = '{ahead}'")
    row_id = world.commit(shop_kinds.order, queue="unread", ordering_key="order:41", expires=1800)
    with world.engine.begin() as connection:
        deliveries.reschedule(connection, row_id, by="dana", reason="the warehouse opens at noon", countdown=900)
        deliveries.pause(connection, "queue", "unread", by="dana", reason="the printer is on fire")
    try:
        page.goto(f"{flower.url}/delivery/{row_id}")
    finally:
        with world.engine.begin() as connection:
            deliveries.resume(connection, "queue", "unread", by="dana")

    expect(page.locator("#delivery-why")).to_contain_text("the printer is on fire")
    picture(page, pictures / "flower-delivery.png", PHONE)
    assert_it_fits(page)
    page.locator("#delivery-why a").click()
    expect(page).to_have_url(re.compile(f"/delivery/{ahead}$"))
    expect(page.locator("#delivery-state")).to_have_text("pending")


def assert_it_fits(page: Page) -> None:
    """On a phone nobody scrolls sideways to read why."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
