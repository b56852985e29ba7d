"""
Renders `states.py` into the guard triggers of a migration and into `docs/state_machines.md`.

`python -m durable_core.database.guards` writes both. Migrations never import this: they
carry the text it wrote, so that an old migration stays what it was.
"""

from __future__ import annotations

from pathlib import Path

from durable_core.states import DELIVERY_MOVES, TERMINAL, DeliveryState, FenceRule, Move, SettleRule

GUARDS = Path(__file__).parent / "migrations" / "0002_guards.sql"
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


def guards_sql() -> str:
    """The guard function of the deliveries table. Its trigger, and the guards of the journal, stand in 0001."""
    legal = "\n".join(_legal(move) for move in DELIVERY_MOVES)
    terminal = _quoted(tuple(state for state in DeliveryState if state in TERMINAL))
    return f"""\
-- Written by durable_core.database.guards from states.py. Do not edit: change the table and write a new migration.
-- The database refuses what is illegal, whoever asks, psql included.

create or replace function durable.guard_delivery() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    legal boolean;
begin
    if tg_op = 'INSERT' then
        if new.state <> 'pending' or new.fence <> 0 or new.settled_fence <> 0 or new.attempts <> 0 then
            raise exception 'delivery %: a delivery begins pending, unclaimed, with fence 0', new.id
                using errcode = '55000', hint = 'Enqueue it and let a worker claim it.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.state not in ({terminal}) then
            raise exception 'delivery %: it is %, and only finished deliveries may be deleted', old.id, old.state
                using errcode = '55000', hint = 'Only rows that ended may go.';
        end if;
        return old;
    end if;
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
    end if;
    if new.fence < old.fence or new.settled_fence < old.settled_fence then
        raise exception 'delivery %: a fence never falls (fence % to %, settled % to %)',
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
        raise exception 'delivery %: % to % is no legal move', old.id, old.state, new.state
            using errcode = '55000', hint = 'docs/state_machines.md lists the legal moves; use `durable deliveries`.';
    end if;
    if not legal then
        raise exception
            'delivery %: the move % to % breaks its fence rule (fence % to %, settled % to %)',
            old.id, old.state, new.state, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'docs/state_machines.md tells what each move does to the fences.';
    end if;
    return new;
end
$guard$;
"""


def docs_page() -> str:
    """`docs/state_machines.md`, from the same table."""
    states = ", ".join(f"`{state}`" for state in DeliveryState)
    terminal = ", ".join(f"`{state}`" for state in DeliveryState if state in TERMINAL)
    rows = "\n".join(
        f"| `{move.source}` | `{move.target}` | {', '.join(f'`{name}`' for name in move.names)} "
        f"| {move.fence.value} | {move.settle.value} | {move.says} |"
        for move in DELIVERY_MOVES
    )
    return f"""\
# State machines

Written by `python -m durable_core.database.guards` from `durable_core/states.py`; the database's guard triggers are
written from the same table, and a test keeps the three equal.

## Deliveries

States: {states}. Terminal: {terminal}. "Retrying" is no state: it is `pending` with attempts behind it and a due time
ahead.

| from | to | moves | fence | settled fence | when |
| --- | --- | --- | --- | --- | --- |
{rows}

Everything else is refused by the database, whoever asks. The fence never falls, and `settled_fence` never exceeds it.
The journal takes new lines only: no UPDATE, no TRUNCATE, and no DELETE while the row of the line lives.
"""


def main() -> None:
    GUARDS.write_text(guards_sql(), encoding="utf-8")
    DOCS.write_text(docs_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
