"""Which names look like a secret, what a declaration says to one, and what people see of it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from durable_core import DefinitionError, Secret, Step
from durable_core.arguments import Signature
from durable_core.secrets import MASK, looks_secret, masked


@pytest.mark.parametrize(
    "name",
    [
        "password", "passwd", "secret", "token", "api_key", "apikey", "access_key", "private_key", "credential",
        "credentials", "authorization", "user_password", "access_token", "aws_secret_access_key", "client_secret",
        "new_password", "password_new", "password_2", "token2", "secret_value", "apiKey", "accessToken", "API_KEY",
        "X-Api-Key", "Proxy-Authorization", "_token", "SECRET", "userPassword", "passphrase", "signing_key",
    ],
)  # fmt: skip
def test_a_name_whose_last_word_is_a_secret_looks_like_one(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "token_count", "max_tokens", "secretary", "secret_name", "password_reset_url", "tokenizer", "key", "api",
        "idempotency_key", "sort_key", "public_key_id", "passwordless", "payment_authorization", "sign_with",
        "headers_from", "author", "", "_", "2", "new", "monkey", "credentialed", "api_key_id", "broken",
    ],
)  # fmt: skip
def test_any_other_name_does_not(name: str) -> None:
    assert not looks_secret(name)


def test_an_argument_that_looks_like_a_secret_is_refused_when_its_kind_is_declared() -> None:
    def handler(step: Step, user: int, *, api_key: str) -> None: ...

    with pytest.raises(DefinitionError, match=r"'mail.sync': argument 'api_key' looks like a secret.*Secret\[\.\.\.\]"):
        Signature("mail.sync", handler)


def test_the_step_may_be_called_anything() -> None:
    def handler(token: Step) -> None: ...

    assert Signature("mail.sync", handler).pack([], {}) == "{}"


def plainly(step: Step, password: Secret[str]) -> None: ...
def optionally(step: Step, password: Secret[str] | None = None) -> None: ...
def wholly(step: Step, password: Secret[str | None] = None) -> None: ...
def within(step: Step, credentials: list[Secret[str]]) -> None: ...
def besides(step: Step, token: Annotated[Secret[str], "of the shop"]) -> None: ...
def below(step: Step, secret: Secret[Below]) -> None: ...
def otherwise(step: Step, note: Secret[str]) -> None: ...


class Below:
    """A type that is declared after the handler."""


@pytest.mark.parametrize("handler", [plainly, optionally, wholly, within, besides, below, otherwise])
def test_a_secret_that_is_annotated_is_taken_and_hidden(handler: Any) -> None:
    (name,) = (name for name in handler.__annotations__ if name not in ("step", "return"))
    assert Signature("mail.sync", handler).hidden == {name}


def test_a_type_that_is_declared_later_still_does_not_make_it_a_secret() -> None:
    def handler(step: Step, secret: Later) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(DefinitionError, match="'secret'"):
        Signature("mail.sync", handler)


def test_a_secret_is_checked_and_comes_back_as_its_bare_type() -> None:
    signature = Signature("mail.sync", plainly)
    assert signature.unpack(signature.pack(["hunter2"], {})) == {"password": "hunter2"}
    with pytest.raises(Exception, match="password") as refused:
        signature.pack([5], {})
    assert "5" not in str(refused.value)


def test_people_see_the_others() -> None:
    arguments = {"note": "n", "user": 7, "token": "hunter2", "body": [{"apiKey": "hunter2", "n": 1}], "x": {"y": "z"}}
    assert masked(arguments, frozenset({"note"})) == {
        "note": MASK, "user": 7, "token": MASK, "body": [{"apiKey": MASK, "n": 1}], "x": {"y": "z"},
    }  # fmt: skip
