"""
A house is sold to two buyers who both have to sign, and a signature service reports each signature by a webhook.

`python house_sale.py` plays it from the first offer to the keys, and prints what could be done on the way.
"""

import json
import uuid
from datetime import date

from myshop import engine
from pydantic import BaseModel
from sqlalchemy.orm import Session

from durable_core import CaseContext, Cases, CaseType, Event, Scope, Unmet

# --- the state, and the steps on it ---------------------------------------------------------------


class Buyer(BaseModel):
    name: str
    envelope: str | None = None
    signed_on: date | None = None


class Sale(BaseModel):
    address: str
    seller: str
    price: int | None = None
    buyers: dict[str, Buyer]
    keys_handed_over: bool = False


class Price(BaseModel):
    amount: int


class Signed(BaseModel):
    signed_on: date


sale = CaseType("sale", state=Sale)


def price_is_agreed(state: Sale) -> bool | Unmet:
    return state.price is not None or Unmet("the price is not agreed")


def nothing_is_signed(state: Sale) -> bool:
    return all(buyer.envelope is None for buyer in state.buyers.values())


def all_have_signed(state: Sale) -> bool | Unmet:
    missing = [buyer.name for buyer in state.buyers.values() if buyer.signed_on is None]
    return not missing or Unmet(f"not signed by {', '.join(missing)}")


def keys_are_here(state: Sale) -> bool:
    return not state.keys_handed_over


def is_seller(state: Sale, actor: dict) -> bool:
    return actor.get("person") == state.seller


def is_the_signature_service(state: Sale, actor: dict) -> bool:
    return actor.get("system") == "signatures"


def not_sent(state: Sale, element: str) -> bool:
    return state.buyers[element].envelope is None


def sent_and_not_signed(state: Sale, element: str) -> bool | Unmet:
    buyer = state.buyers[element]
    if buyer.envelope is None:
        return Unmet("no contract was sent to them")
    return buyer.signed_on is None or Unmet("they have signed")


each_buyer = Scope(select=lambda state: list(state.buyers), key=lambda element: element)
"""One contract for each buyer, signed one by one: the steps with this scope are there once for each."""


@sale.step(
    "agree_price",
    requires={"nothing is signed": nothing_is_signed},
    permits={"is the seller": is_seller},
    input=Price,
)
def agree_price(state: Sale, ctx: CaseContext) -> Sale:
    state.price = ctx.input.amount
    return state


@sale.step(
    "send_contract",
    scope=each_buyer,
    requires={"the price is agreed": price_is_agreed, "not sent yet": not_sent},
    permits={"is the seller": is_seller},
)
def send_contract(state: Sale, ctx: CaseContext) -> Sale:
    """Send the contract, and note under which name the service will speak of it."""
    buyer = state.buyers[ctx.element]
    # The key: if this process dies after the call, the next execution of the same request sends no second envelope.
    buyer.envelope = signatures.send(buyer.name, key=f"{ctx.key}:{ctx.scope_key}")
    ctx.correlate("signatures", buyer.envelope, step="record_signature")
    return state


@sale.step(
    "record_signature",
    scope=each_buyer,
    requires={"sent and not signed": sent_and_not_signed},
    permits={"is the signature service": is_the_signature_service},
    input=Signed,
)
def record_signature(state: Sale, ctx: CaseContext) -> Sale:
    state.buyers[ctx.element].signed_on = ctx.input.signed_on
    return state


@sale.step(
    "hand_over_keys",
    requires={"all have signed": all_have_signed, "keys are here": keys_are_here},
    permits={"is the seller": is_seller},
)
def hand_over_keys(state: Sale, ctx: CaseContext) -> Sale:
    state.keys_handed_over = True
    ctx.end()
    return state


cases = Cases(engine, [sale])


# --- the signature service, and its webhook --------------------------------------------------------


class Signatures:
    """Stands for the service of others. It remembers what it was asked for under each key."""

    def __init__(self) -> None:
        self.envelopes: dict[str, str] = {}

    def send(self, name: str, *, key: str) -> str:
        return self.envelopes.setdefault(key, f"envelope-{uuid.uuid4()}")


signatures = Signatures()


def webhook(body: bytes) -> int:
    """What your web framework calls with each request of the service, once you have checked its signature."""
    said = json.loads(body)
    done = cases.ingest(
        Event("signatures", said["envelope"], said["type"], {"signed_on": said["on"]}, event_id=said["id"])
    )
    print("webhook:", *filter(None, (done.status, done.reason)))
    return 200  # whatever became of it: it is written down, and sending it again would change nothing


# --- the play ---------------------------------------------------------------------------------------

seller = {"person": "dana"}


def told(case_id: str) -> None:
    with Session(engine) as session:
        found = cases.affordances(session, case_id, actor=seller)
    print("dana can:", ", ".join(f"{one.step} {one.scope_key or ''}".strip() for one in found) or "do nothing now")


def main() -> None:
    with Session(engine) as session, session.begin():
        house = Sale(address="7 Mill Lane", seller="dana", buyers={"ada": Buyer(name="Ada"), "ben": Buyer(name="Ben")})
        case = cases.create(session, "sale", house)

    told(case.id)
    cases.execute(case.id, "agree_price", actor=seller, input={"amount": 400_000})
    told(case.id)
    for buyer in ("ada", "ben"):
        cases.execute(case.id, "send_contract", scope_key=buyer, actor=seller)
    told(case.id)

    with Session(engine) as session:
        envelopes = [one.external_id for one in cases.correlations(session, case.id)]
    for number, envelope in enumerate(envelopes):
        body = json.dumps({"id": f"{case.id}-{number}", "type": "signed", "envelope": envelope, "on": "2026-03-01"})
        webhook(body.encode())
        webhook(body.encode())  # services send what they are not sure of twice
    webhook(json.dumps({"id": "x", "type": "signed", "envelope": "unheard-of", "on": "2026-03-01"}).encode())

    told(case.id)
    cases.execute(case.id, "hand_over_keys", actor=seller)
    with Session(engine) as session:
        print("journal:", ", ".join(one.step for one in cases.executions(session, case.id)))
        print("still true:", all(one.matches for one in cases.replay(session, case.id)))


if __name__ == "__main__":
    main()
