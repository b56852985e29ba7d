"""`durable up --web`: what is said of an app that cannot be served. Where it is served: test_up.py."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from durable_core.cli.exits import AppNotLoaded
from durable_core.cli.web import Web
from tests.cli.conftest import error_of, value_of

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is empty, and its modules are nobody else's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "name", ["", "web", "web.app", "web:", ":app", "web:app()", "web.py:app:app", "we b:app", "--x"]
)
def test_what_is_no_module_and_app_is_said_before_anything_starts(run: Run, tmp_path: Path, name: str) -> None:
    done = run("up", "--web", name, "--json")
    assert (done.exit_code, error_of(done)) == (2, "USAGE")
    assert "such as web:app" in value_of(done)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--web-port", "8001"), "give both"),
        (("--web", "web:app", "--port", "8000"), "cannot both have port 8000"),
        (("--web", "web:app", "--web-port", "65536"), "0<=x<=65535"),
    ],
)
def test_a_port_that_cannot_be_the_apps_is_said(run: Run, tmp_path: Path, line: tuple[str, ...], said: str) -> None:
    done = run("up", *line, "--json")
    assert (done.exit_code, error_of(done)) == (2, "USAGE")
    assert said in value_of(done)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_without_uvicorn_it_names_the_extra(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run("up", "--web", "web:app", "--json")
    assert (done.exit_code, error_of(done)) == (2, "NOT_INSTALLED")
    assert "pip install 'durable-core[web]'" in value_of(done)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "has no attribute 'app'"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("import os\nos.environ['SHOP_KEY']", "KeyError: 'SHOP_KEY'"),
        ("app = (", "SyntaxError"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("app = {'title': 'Groceries'}", "names a dict, not an ASGI app"),
    ],
)
def test_an_app_that_does_not_load_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    name = f"pages_{tmp_path.name}"  # imported once per name
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(AppNotLoaded) as refused:
        Web(f"{name}:app", 8000).check_loads()
    sentence = str(refused.value)
    assert said in sentence
    assert f"'{name}:app'" in sentence
    assert "\n" not in sentence
    assert (refused.value.code, refused.value.reason) == (2, "APP_NOT_LOADED")
