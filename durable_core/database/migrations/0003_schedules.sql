-- The schedules of periodic kinds. A new table and nothing else: no table that work is in is touched or locked.
-- One row per slot is kept by the key of that row (deliveries_key) while it is there, and by last_slot for ever.

create table durable.schedules (
    kind          text        primary key constraint kind_has_a_name check (length(kind) between 1 and 200),
    id            uuid        not null unique,
    cron          text        not null,
    timezone      text        not null,
    missed        text        not null constraint missed_is_known check (missed in ('skip', 'once', 'all')),
    since         timestamptz not null,
    last_slot     timestamptz,
    next_slot     timestamptz not null,
    paused_at     timestamptz,
    paused_until  timestamptz,
    paused_by     text,
    paused_reason text,
    skipped_from  timestamptz,
    skipped_to    timestamptz,
    skipped_at    timestamptz,
    constraint next_slot_is_later_than_the_last check (next_slot > last_slot),
    constraint paused_by_somebody_for_a_reason check (
        (paused_at is null) = (paused_by is null)
        and (paused_at is null) = (paused_reason is null)
        and (paused_at is not null or paused_until is null)),
    constraint skipped_in_full check (
        (skipped_from is null) = (skipped_to is null) and (skipped_from is null) = (skipped_at is null))
);

comment on table durable.schedules is
    'One row per periodic kind. The sweep "cron" locks it, writes the rows of the slots that are due and moves next_slot on, in one transaction.';
comment on column durable.schedules.id is 'Its lines in the journal have this row_id and the contract ''schedule''.';
comment on column durable.schedules.since is 'When it was first seen, or its cron or timezone last changed.';
comment on column durable.schedules.last_slot is
    'The latest slot that was decided, by a row or by leaving it out. It never falls: what is decided is decided once, also when the row was pruned long since.';
comment on column durable.schedules.skipped_from is
    'The first and (skipped_to) the last slot of the latest stretch that was left out.';
