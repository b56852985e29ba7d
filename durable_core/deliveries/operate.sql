-- name: redrive
-- before: dead or failed
-- after:  pending and due now, with a new budget and a fence one higher, so that no owner of old can still report;
--         the old counters and error are in the journal
-- locks:  the row, skipping it when somebody has it: an operator must not wait for a handler to end
with locked as materialized (
    select d.id, d.state, d.fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes, d.error_code, d.error_message
    from durable.deliveries d
    where d.id = cast(:id as uuid)
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
redriven as (
    update durable.deliveries d
    set state = 'pending',
        fence = d.fence + 1,
        settled_fence = d.fence + 1,
        attempts = 0,
        interruptions = 0,
        shutdowns = 0,
        snoozes = 0,
        due_at = clock.now,
        hint_at = clock.now,
        finished_at = null,
        claimed_at = null,
        error_code = null,
        error_message = null,
        held_reason = null
    from locked l, clock
    where d.id = l.id and l.state in ('dead', 'failed')
    returning d.id, d.state, d.fence
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, by_whom, reason, facts)
    select r.id, 'delivery', 'redrive', l.state, r.state, r.fence, 0, cast(:by as text), cast(:reason as text),
        jsonb_build_object(
            'attempts', l.attempts, 'interruptions', l.interruptions, 'shutdowns', l.shutdowns,
            'snoozes', l.snoozes, 'error_code', l.error_code, 'error', l.error_message)
    from redriven r join locked l on l.id = r.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority,
    l.id is null as busy, r.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join redriven r on r.id = d.id
where d.id = cast(:id as uuid)

-- name: release
-- before: held back by a sweep that failed on it
-- after:  the sweeps and the claims see it again; its state is what it was
-- locks:  the row, skipping it when somebody has it
with locked as materialized (
    select d.id, d.state, d.fence, d.held_reason
    from durable.deliveries d
    where d.id = cast(:id as uuid)
    for no key update skip locked
),
released as (
    update durable.deliveries d
    set held_reason = null
    from locked l
    where d.id = l.id and l.held_reason is not null
    returning d.id, d.state, d.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason, facts)
    select r.id, 'delivery', 'unhold', r.state, r.state, r.fence, cast(:by as text), cast(:reason as text),
        jsonb_build_object('held_reason', l.held_reason)
    from released r join locked l on l.id = r.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority,
    l.id is null as busy, r.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join released r on r.id = d.id
where d.id = cast(:id as uuid)
