"""
Renders `states.py` into the guard triggers of a migration and into `docs/state_machines.md`.

`python -m durable_core.database.guards` writes both. Migrations never import this: they
carry the text it wrote, so that an old migration stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from durable_core.states import (
    DELIVERY_MOVES,
    OPERATION_MOVES,
    OPERATION_TERMINAL,
    PLAN_MOVES,
    PLAN_TERMINAL,
    TERMINAL,
    DeliveryState,
    FenceRule,
    Move,
    OperationState,
    PlanState,
    SettleRule,
)

MIGRATIONS = Path(__file__).parent / "migrations"
DOCS = Path(__file__).parents[2] / "docs" / "state_machines.md"

_FENCE_SQL = {
    FenceRule.KEPT: "new.fence = old.fence",
    FenceRule.RAISED: "new.fence = old.fence + 1",
}
_SETTLE_SQL = {
    SettleRule.KEPT: "new.settled_fence = old.settled_fence",
    SettleRule.OPTIONAL: "new.settled_fence in (old.settled_fence, new.fence)",
    SettleRule.REQUIRED: "new.settled_fence = new.fence and new.settled_fence > old.settled_fence",
}


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _legal(move: Move) -> str:
    return (
        f"        when '{move.source} -> {move.target}' then\n"
        f"            {_FENCE_SQL[move.fence]} and {_SETTLE_SQL[move.settle]}"
    )


_HEAD = """\
-- Written by durable_core.database.guards from states.py. Do not edit: change the table and write a new migration.
-- The database refuses what is illegal, whoever asks, psql included.
"""


@dataclass(frozen=True)
class Guard:
    """What the guard of one table says: its moves from `states.py`, and the rules that no move may break."""

    contract: str
    title: str
    remark: str
    path: Path
    replaces: bool
    states: type[StrEnum]
    terminal: frozenset[Any]
    moves: tuple[Move, ...]
    begins: str
    """The condition on a new row that is refused, with its sentence and hint, as SQL."""
    deletable: str
    never: str
    """What no change may do, whatever the move, as SQL."""
    command: str

    def sql(self) -> str:
        """The migration's text."""
        legal = "\n".join(_legal(move) for move in self.moves)
        terminal = _quoted(tuple(state for state in self.states if state in self.terminal))
        create = "create or replace function" if self.replaces else "create function"
        name = self.contract
        trigger = (
            ""
            if self.replaces
            else f"""
create trigger guard_{name} before insert or update or delete on durable.{name}s
    for each row execute function durable.guard_{name}();
"""
        )
        return f"""\
{_HEAD}
{create} durable.guard_{name}() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    legal boolean;
begin
    if tg_op = 'INSERT' then
{self.begins}
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.state not in ({terminal}) then
            raise exception '{name} %: it is %, and only finished {self.deletable} may be deleted', old.id, old.state
                using errcode = '55000', hint = 'Only rows that ended may go.';
        end if;
        return old;
    end if;
{self.never}
    if new.fence < old.fence or new.settled_fence < old.settled_fence then
        raise exception '{name} %: a fence never falls (fence % to %, settled % to %)',
            old.id, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'A lower fence would let a worker that lost its claim write again.';
    end if;
    if new.state = old.state then
        return new;
    end if;
    legal := case old.state || ' -> ' || new.state
{legal}
        else null
    end;
    if legal is null then
        raise exception '{name} %: % to % is no legal move', old.id, old.state, new.state
            using errcode = '55000', hint = 'docs/state_machines.md lists the legal moves; use `{self.command}`.';
    end if;
    if not legal then
        raise exception
            '{name} %: the move % to % breaks its fence rule (fence % to %, settled % to %)',
            old.id, old.state, new.state, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'docs/state_machines.md tells what each move does to the fences.';
    end if;
    return new;
end
$guard$;
{trigger}"""


_ENDED_IS_ENDED = """\
    if old.state in ({terminal}) and new is distinct from old then
        raise exception '{name} %: it is %, and nothing of it changes any more', old.id, old.state
            using errcode = '55000', hint = '{again}';
    end if;"""

_CLAIMS = """\
    if new.owner is not null and new.fence <> old.fence + 1
        and (old.owner is distinct from new.owner or old.owner_pid is distinct from new.owner_pid) then
        raise exception '{name} %: a claim raises the fence by one (fence % to %)', old.id, old.fence, new.fence
            using errcode = '55000', hint = 'Two owners of one fence could both write.';
    end if;"""

DELIVERY = Guard(
    "delivery", "Deliveries",
    '"Retrying" is no state: it is `pending` with attempts behind it and a due time ahead.',
    MIGRATIONS / "0002_guards.sql", True, DeliveryState, TERMINAL, DELIVERY_MOVES,
    begins="""\
        if new.state <> 'pending' or new.fence <> 0 or new.settled_fence <> 0 or new.attempts <> 0 then
            raise exception 'delivery %: a delivery begins pending, unclaimed, with fence 0', new.id
                using errcode = '55000', hint = 'Enqueue it and let a worker claim it.';
        end if;""",
    deletable="deliveries",
    never="""\
    if new.id <> old.id or new.kind <> old.kind or new.created_at <> old.created_at
        or new.ordering_key is distinct from old.ordering_key or new.ordering_strict <> old.ordering_strict then
        raise exception 'delivery %: what it is (id, kind, created_at, ordering key) never changes', old.id
            using errcode = '55000', hint = 'Enqueue another delivery.';
    end if;
    if new.key is distinct from old.key
        and (new.key is not null or old.state = 'pending' or new.state <> old.state) then
        raise exception 'delivery %: its key never changes; it may be given up once the delivery has begun', old.id
            using errcode = '55000', hint = 'Enqueue another delivery.';
    end if;
    if new.digest <> old.digest and not (
        old.state = 'pending' and new.state = 'pending' and new.fence = old.fence + 1 and new.settled_fence = new.fence
    ) then
        raise exception 'delivery %: what it is to do never changes, but while it waits and under a new fence', old.id
            using errcode = '55000', hint = 'Whoever has the old arguments could else report on the new ones.';
    end if;""",
    command="durable deliveries",
)  # fmt: skip

_STATES = _quoted(tuple(state for state in PlanState if state in PLAN_TERMINAL))

PLAN = Guard(
    "plan", "Plans", "Between two steps it is `executing` and nobody owns it; each claim of a step raises the fence.",
    MIGRATIONS / "0010_guards.sql", True, PlanState, PLAN_TERMINAL, PLAN_MOVES,
    begins="""\
        if new.state <> 'pending' or new.fence <> 0 or new.settled_fence <> 0 or new.receipts <> 0
            or new.approved_by is not null or new.approved_at is not null or new.kind <> new.steps -> 0 ->> 'kind' then
            raise exception 'plan %: a plan begins pending, approved by nobody, with fence 0 and no receipt', new.id
                using errcode = '55000', hint = 'Propose it, and let a person approve it.';
        end if;""",
    deletable="plans",
    never=_ENDED_IS_ENDED.format(terminal=_STATES, name="plan", again="To try again, propose again.")
    + """
    if new.id <> old.id or new.steps <> old.steps or new.step_count <> old.step_count or new.digest <> old.digest
        or new.scopes <> old.scopes or new.risk <> old.risk or new.self_approval <> old.self_approval
        or new.proposed_by <> old.proposed_by or new.created_at <> old.created_at or new.expires_at <> old.expires_at
        or new.origin is distinct from old.origin or new.rationale is distinct from old.rationale
        or new.compensates is distinct from old.compensates then
        raise exception 'plan %: what was proposed never changes', old.id
            using errcode = '55000', hint = 'Propose another plan.';
    end if;
    if new.approved_by is distinct from old.approved_by or new.approved_at is distinct from old.approved_at then
        if old.state <> 'pending' or new.state <> 'approved' then
            raise exception 'plan %: who approved it, and when, never changes', old.id
                using errcode = '55000', hint = 'Propose another plan.';
        end if;
    end if;
    if old.state = 'pending' and new.state = 'approved' and new.approved_by = old.proposed_by
        and not old.self_approval then
        raise exception 'plan %: its proposer may not approve it', old.id
            using errcode = '55000', hint = 'Somebody else approves it.';
    end if;
    -- Our statements lock, then compare, then stamp; the clock goes on from there to here. So a stamp from before the
    -- end is believed for ten seconds after it, and no stamp for longer.
    if ((old.state = 'pending' and new.state = 'approved') or (old.state = 'approved' and new.state = 'executing'))
        and old.expires_at <= durable.durable_now() - (case
            when old.state = 'pending' and new.approved_at < old.expires_at then interval '10 s'
            when old.state = 'approved' and new.claimed_at < old.expires_at then interval '10 s'
            else interval '0' end) then
        raise exception 'plan %: it expired at %, and can be neither approved nor started', old.id, old.expires_at
            using errcode = '55000', hint = 'Propose it again.';
    end if;
    if new.state in ('pending', 'approved', 'executing')
        and new.kind <> new.steps -> cast(least(new.receipts, new.step_count - 1) as integer) ->> 'kind' then
        raise exception 'plan %: % is not the kind of the step that was approved as the next', old.id, new.kind
            using errcode = '55000', hint = 'Propose another plan.';
    end if;
    if new.receipts <> old.receipts and not (
        old.state = 'executing' and old.owner is not null and new.owner is null and new.receipts = old.receipts + 1
        and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        and exists (
            select from durable.plan_receipts r
            where r.plan_id = old.id and r.step = old.receipts and (r.outcome = 'ok') = (new.state <> 'failed'))
    ) then
        raise exception 'plan %: receipts go from % to % without a step that wrote one',
            old.id, old.receipts, new.receipts
            using errcode = '55000', hint = 'A step, its receipt and this count commit together.';
    end if;
"""
    + _CLAIMS.format(name="plan"),
    command="durable plans",
)  # fmt: skip

_STATES = _quoted(tuple(state for state in OperationState if state in OPERATION_TERMINAL))

OPERATION = Guard(
    "operation", "Operations",
    "Between two polls it is `running` and nobody owns it; each claim of a poll raises the fence.",
    MIGRATIONS / "0008_guards.sql", False, OperationState, OPERATION_TERMINAL,
    OPERATION_MOVES,
    begins="""\
        if new.state <> 'queued' or new.fence <> 0 or new.settled_fence <> 0 or new.issued_at is not null then
            raise exception 'operation %: an operation begins queued, not issued, with fence 0', new.id
                using errcode = '55000', hint = 'Start it, and let a worker issue it.';
        end if;""",
    deletable="operations",
    never=_ENDED_IS_ENDED.format(terminal=_STATES, name="operation", again="To try again, start another operation.")
    + """
    if new.id <> old.id or new.kind <> old.kind or new.key is distinct from old.key or new.arguments <> old.arguments
        or new.digest <> old.digest or new.started_by <> old.started_by or new.created_at <> old.created_at
        or new.one_in_flight <> old.one_in_flight or new.trigger <> old.trigger
        or new.patience_seconds <> old.patience_seconds or new.every_seconds <> old.every_seconds then
        raise exception 'operation %: what was started never changes', old.id
            using errcode = '55000', hint = 'Start another operation.';
    end if;
    if new.issued_at is distinct from old.issued_at and not (old.state = 'queued' and new.state = 'running') then
        raise exception 'operation %: its call is issued at most once', old.id
            using errcode = '55000', hint = 'Nothing may issue it again; look at the other side what became of it.';
    end if;
    if old.external_ids is not null and new.external_ids is distinct from old.external_ids then
        raise exception 'operation %: the ids of the other side never change once they are known', old.id
            using errcode = '55000', hint = 'Start another operation.';
    end if;
"""
    + _CLAIMS.format(name="operation"),
    command="durable operations",
)  # fmt: skip

GUARDS = (DELIVERY, PLAN, OPERATION)


def _section(guard: Guard) -> str:
    states = ", ".join(f"`{state}`" for state in guard.states)
    terminal = ", ".join(f"`{state}`" for state in guard.states if state in guard.terminal)
    rows = "\n".join(
        f"| `{move.source}` | `{move.target}` | {', '.join(f'`{name}`' for name in move.names)} "
        f"| {move.fence.value} | {move.settle.value} | {move.says} |"
        for move in guard.moves
    )
    return f"""\
## {guard.title}

States: {states}. Terminal: {terminal}.
{guard.remark}

| from | to | moves | fence | settled fence | when |
| --- | --- | --- | --- | --- | --- |
{rows}
"""


def docs_page() -> str:
    """`docs/state_machines.md`, from the same table."""
    sections = "\n".join(_section(guard) for guard in GUARDS)
    return f"""\
# State machines

Written by `python -m durable_core.database.guards` from `durable_core/states.py`; the database's guard triggers are
written from the same table, and a test keeps the three equal.

{sections}
Everything else is refused by the database, whoever asks. The fence never falls, and `settled_fence` never exceeds it.
The journal takes new lines only: no UPDATE, no TRUNCATE, and no DELETE while the row of the line lives.
"""


def main() -> None:
    for guard in GUARDS:
        guard.path.write_text(guard.sql(), encoding="utf-8")
    DOCS.write_text(docs_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
