-- name: pause
-- before: a schedule, paused or not
-- after:  it is paused, from now until then or until it is resumed; the journal has who and why
-- locks:  the schedule's row
with paused as (
    update durable.schedules s
    set paused_at = durable.durable_now(),
        paused_until = cast(:until as timestamptz),
        paused_by = :by,
        paused_reason = :reason
    where s.kind = :kind
    returning s.id
)
insert into durable.journal (row_id, contract, move, fence, by_whom, reason, facts)
select p.id, 'schedule', 'pause', 0, cast(:by as text), cast(:reason as text),
    jsonb_build_object('until', cast(:until as timestamptz))
from paused p
returning row_id

-- name: lock
-- The schedule, and the time once it is locked.
-- locks: the schedule's row
with locked as materialized (
    select cast(s.id as text) as id, s.cron, s.timezone, s.missed, s.last_slot, s.paused_at
    from durable.schedules s
    where s.kind = :kind
    for no key update
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
)
select l.*, clock.now from locked l cross join clock

-- name: resume
-- before: paused, and locked in this transaction
-- after:  no longer paused; what was missed is left out, for its next slot lies ahead; the journal has who and why
-- locks:  the schedule's row, which is locked already
with resumed as (
    update durable.schedules s
    set paused_at = null, paused_until = null, paused_by = null, paused_reason = null, next_slot = :next_slot
    where s.id = cast(:id as uuid) and s.paused_at is not null
    returning s.id
)
insert into durable.journal (row_id, contract, move, fence, by_whom, reason)
select r.id, 'schedule', 'resume', 0, cast(:by as text), cast(:reason as text) from resumed r

-- name: now
select durable.durable_now() as now

-- name: journal_run
-- before: a row that this transaction has just written
-- after:  its journal has who asked for it, and why
insert into durable.journal (row_id, contract, move, to_state, fence, by_whom, reason)
values (cast(:id as uuid), 'delivery', 'run_now', 'pending', 0, :by, :reason)
