"""Workers of the rough kinds, and the world of a whole module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.celery.conftest import Nodes
from tests.celery.nodes import ShopContainer, ShopSetup, ShopWorker
from tests.celery.rough import Rough
from tests.celery.world import World


class RoughContainer(ShopContainer):
    """A `celery worker` of the rough app."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "tests.celery.rough_app", "worker", f"--loglevel={cls.log_level()}", *args]


def rough_worker(nodes: Nodes, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> ShopWorker:
    """A worker that is starting; `ready()` waits for it. It ends with the other nodes."""
    node = ShopWorker(RoughContainer(*nodes._described(name, arguments, environment)), app=nodes._app)
    nodes._nodes.append(node)
    return node


@contextmanager
def rough_world(request: pytest.FixtureRequest, celery_setup: ShopSetup) -> Iterator[tuple[World, Rough]]:
    """The running shop for a whole module, and the rough kinds declared in this process too."""
    kinds = Rough()
    world = World(
        request.getfixturevalue("shop_engine"),
        request.getfixturevalue("gates"),
        celery_setup.app,
        request.getfixturevalue("durable"),
        request.getfixturevalue("celery_broker"),
    )
    try:
        yield world, kinds
    finally:
        world.clean_up()
        kinds.forget()
