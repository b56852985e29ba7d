"""Signatures and credentials of webhooks: named in the payload, kept in the settings."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine
from standardwebhooks import Webhook, WebhookVerificationError

from durable_core import DefinitionError, GiveUp, InvalidArguments, enqueue_by_name
from durable_core.deliveries.attempt import Attempted, Outcome, Worker, perform
from durable_core.deliveries.read import Delivery
from durable_core.ready import webhook
from durable_core.ready.environment import webhooks_from_environment
from durable_core.ready.webhook import Webhooks
from durable_core.testing import MovableClock
from tests.sinks import Call, Receiver, status

CarryOut = Callable[..., Attempted]
Declare = Callable[..., Any]
Row = Callable[[str], Delivery]


def key(seed: str, size: int = 32) -> str:
    return f"whsec_{base64.b64encode(hashlib.sha256(seed.encode()).digest()[:size]).decode()}"


NEW, OLD, OTHER = key("new"), key("old"), key("other")
BILLING = Webhooks(
    private_targets=True, secrets={"billing": (NEW, OLD)}, headers={"shop": {"Authorization": "Bearer 7"}}
)


def verified(call: Call, secret: str) -> Any:
    return Webhook(secret).verify(call.body, call.headers)


def test_a_signed_call_is_verified_by_each_active_key_and_no_other(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    """As the receivers' library has it, and once by hand."""
    done = carry_out(declare_webhook(BILLING), url=receiver.url, body={"ä": 1}, sign_with="billing")

    assert done.outcome is Outcome.SENT
    (call,) = receiver.calls
    assert verified(call, NEW) == verified(call, OLD) == {"ä": 1}
    with pytest.raises(WebhookVerificationError):
        verified(call, OTHER)
    signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.{call.body.decode()}"
    by_hand = [
        base64.b64encode(hmac.new(base64.b64decode(one[6:]), signed.encode(), "sha256").digest()).decode()
        for one in (NEW, OLD)
    ]
    assert call.headers["webhook-signature"] == " ".join(f"v1,{one}" for one in by_hand)


def test_all_attempts_carry_one_id_without_the_dot_that_divides(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver, worker: Worker, clock: MovableClock
) -> None:
    receiver.answers = [status(503)]
    kind = declare_webhook(BILLING)
    first = carry_out(kind, url=receiver.url, body={}, sign_with="billing")
    clock.advance(3600)
    assert perform(worker, kind, first.id).outcome is Outcome.SENT

    assert {call.headers["webhook-id"] for call in receiver.calls} == {f"{kind.name}:{first.id}".replace(".", "_")}
    assert len(receiver.calls) == 2
    assert all(verified(call, NEW) == {} for call in receiver.calls)


def test_an_unsigned_call_carries_no_signature(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    carry_out(declare_webhook(BILLING), url=receiver.url, body={})
    assert not [name for name in receiver.calls[0].headers if name.startswith("webhook-")]


def test_headers_from_the_settings_are_sent_and_stored_nowhere(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver, row: Row
) -> None:
    done = carry_out(declare_webhook(BILLING), url=receiver.url, body={}, headers_from="shop", sign_with="billing")
    assert receiver.calls[0].headers["authorization"] == "Bearer 7"
    kept = json.dumps(row(done.id).as_json())
    assert "Bearer 7" not in kept
    assert NEW not in kept


@pytest.mark.parametrize("argument", ["sign_with", "headers_from"])
def test_a_name_that_is_not_in_the_settings_is_refused_at_enqueue(
    argument: str, declare_webhook: Declare, engine: Engine
) -> None:
    kind = declare_webhook(BILLING)
    with engine.begin() as connection, pytest.raises(InvalidArguments, match=argument) as refused:
        kind.enqueue(connection, "https://example.com/", {}, **{argument: "wages"})
    assert "wages" not in str(refused.value)
    assert NEW not in str(refused.value)


@pytest.mark.parametrize(("argument", "code"), [("sign_with", "UNKNOWN_SECRET"), ("headers_from", "UNKNOWN_HEADERS")])
def test_a_name_that_only_the_worker_can_miss_gives_up(
    argument: str, code: str, declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver, row: Row
) -> None:
    kind = declare_webhook(lambda: BILLING)
    done = carry_out(kind, url=receiver.url, body={}, **{argument: "wages"})
    assert (done.outcome, done.error_code) == (Outcome.FAILED, code)
    assert "'wages'" in str(row(done.id).error_message)
    assert receiver.calls == []


def test_a_name_taken_out_of_the_settings_gives_up_and_does_not_wait_for_another_handler(
    declare_webhook: Declare, engine: Engine, worker: Worker, receiver: Receiver
) -> None:
    secrets = {"billing": NEW}
    kind = declare_webhook(Webhooks(private_targets=True, secrets=secrets))
    with engine.begin() as connection:
        ref = enqueue_by_name(connection, kind.name, {"url": receiver.url, "body": {}, "sign_with": "billing"})
    secrets.clear()
    assert perform(worker, kind, ref.id).error_code == "UNKNOWN_SECRET"


def test_secrets_may_come_from_a_function_at_each_attempt(
    declare_webhook: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    keys = {"billing": OLD}
    kind = declare_webhook(Webhooks(private_targets=True, secrets=lambda: keys, headers=lambda: {"s": {"X-Shop": "7"}}))
    carry_out(kind, url=receiver.url, body={}, sign_with="billing", headers_from="s")
    keys["billing"] = NEW
    carry_out(kind, url=receiver.url, body={}, sign_with="billing")
    assert [verified(call, one) for call, one in zip(receiver.calls, (OLD, NEW), strict=True)] == [{}, {}]
    assert receiver.calls[0].headers["x-shop"] == "7"
    keys["billing"] = "whsec_no"
    done = carry_out(kind, url=receiver.url, body={}, sign_with="billing")
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "BAD_SECRET")


@pytest.mark.parametrize("secret", ["", (), "whsec_", "whsec_***", key("short", 12), (NEW, "no base64!")])
def test_a_key_that_cannot_sign_is_refused_when_it_is_declared_without_being_quoted(secret: Any) -> None:
    with pytest.raises(DefinitionError, match="'billing' cannot sign") as refused:
        Webhooks(secrets={"billing": secret})
    assert key("short", 12)[6:] not in str(refused.value)
    assert "no base64!" not in str(refused.value)


@pytest.mark.parametrize("headers", [{"Host": "x"}, {"X": "a\r\nY: b"}, {"Idempotency-Key": "x"}, {"Webhook-Id": "x"}])
def test_headers_of_the_settings_are_checked_as_all(headers: dict[str, str]) -> None:
    with pytest.raises(DefinitionError, match="'shop' cannot be sent"):
        Webhooks(headers={"shop": headers})


def test_no_setting_that_is_secret_is_in_a_repr() -> None:
    assert NEW not in repr(BILLING)
    assert "Bearer" not in repr(BILLING)


@pytest.mark.parametrize(
    "name", ["Authorization", "proxy-authorization", "Cookie", "X-Api-Key", "X-Auth-Token", "X-CSRF-TOKEN", "apikey"]
)
def test_a_header_that_holds_a_credential_is_refused_in_a_payload(
    name: str, declare_webhook: Declare, engine: Engine
) -> None:
    kind = declare_webhook()
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="headers_from") as refused:
        kind.enqueue(connection, "https://example.com/", {}, {name: "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_a_handler_may_hand_over_what_it_took_from_its_settings(receiver: Receiver) -> None:
    step: Any = type("Step", (), {"key": "shop.webhook:1"})
    webhook.post(BILLING, step, url=receiver.url, body={}, headers={"Authorization": "Bearer 8"})
    assert receiver.calls[0].headers["authorization"] == "Bearer 8"
    with pytest.raises(GiveUp, match="wages"):
        webhook.post(BILLING, step, url=receiver.url, body={}, sign_with="wages")


def test_the_environment_names_secrets_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_WEBHOOK_SECRETS", json.dumps({"billing": [NEW, OLD]}))
    monkeypatch.setenv("DURABLE_WEBHOOK_HEADERS", json.dumps({"shop": {"Authorization": "Bearer 7"}}))
    found = webhooks_from_environment()
    assert (found.secrets, found.headers) == ({"billing": [NEW, OLD]}, {"shop": {"Authorization": "Bearer 7"}})


@pytest.mark.parametrize("variable", ["DURABLE_WEBHOOK_SECRETS", "DURABLE_WEBHOOK_HEADERS"])
@pytest.mark.parametrize(
    "text", ["hunter2", '["hunter2"]', '{"a": 5}', '{"a": ["hunter2", 5]}', '{"a": {"X": ["hunter2"]}}']
)
def test_an_environment_that_cannot_be_read_is_refused_without_being_quoted(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(DefinitionError, match=variable) as refused:
        webhooks_from_environment()
    assert "hunter2" not in str(refused.value)
