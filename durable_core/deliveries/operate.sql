-- What a person, or the application, does to deliveries. Each statement takes one id or several; each locks what it moves,
-- skipping what others hold: an operator must not wait for a handler to end.

-- name: redrive
-- before: dead or failed
-- after:  pending and due now, with a new budget and a fence one higher, so that no owner of old can still report;
--         the old counters and error are in the journal
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select d.id, d.state, d.fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes, d.error_code, d.error_message
    from durable.deliveries d
    where d.id = any (cast(:ids as uuid[]))
    order by d.id
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
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
        expires_at = null,
        finished_at = null,
        discarded_at = null,
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
    select a.id, 'delivery', 'redrive', l.state, a.state, a.fence, 0, cast(:by as text), cast(:reason as text),
        jsonb_build_object(
            'attempts', l.attempts, 'interruptions', l.interruptions, 'shutdowns', l.shutdowns,
            'snoozes', l.snoozes, 'error_code', l.error_code, 'error', l.error_message)
    from acted a join locked l on l.id = a.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority, d.ordering_key,
    l.id is null as busy, a.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join acted a on a.id = d.id
where d.id = any (cast(:ids as uuid[]))

-- name: cancel
-- before: pending, or processing outside its commit
-- after:  canceled under a fence one higher: whoever carries it out is refused, and learns of it at its next heartbeat
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select d.id, d.state, d.owner_host, d.owner_pid, d.lease_expires_at
    from durable.deliveries d
    where d.id = any (cast(:ids as uuid[]))
    order by d.id
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.deliveries d
    set state = 'canceled',
        fence = d.fence + 1,
        settled_fence = d.fence + 1,
        finished_at = clock.now,
        owner = null,
        lease_expires_at = null,
        deadline_at = null,
        waiting_for = null,
        held_reason = null
    from locked l, clock
    where d.id = l.id and l.state in ('pending', 'processing')
    returning d.id, d.state, d.fence, d.attempts
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, by_whom, reason, lease_before)
    select a.id, 'delivery', 'cancel', l.state, a.state, a.fence, a.attempts,
        case when l.state = 'processing' then l.owner_host || ':' || l.owner_pid end,
        cast(:by as text), cast(:reason as text), l.lease_expires_at
    from acted a join locked l on l.id = a.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority, d.ordering_key,
    l.id is null as busy, a.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join acted a on a.id = d.id
where d.id = any (cast(:ids as uuid[]))

-- name: reschedule
-- before: pending
-- after:  pending and due at another time; nothing else of it changes
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select d.id, d.state, d.due_at
    from durable.deliveries d
    where d.id = any (cast(:ids as uuid[]))
    order by d.id
    for no key update skip locked
),
due as materialized (
    select coalesce(cast(:eta as timestamptz), durable.durable_now() + make_interval(secs => :delay_seconds)) as at
    from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.deliveries d
    set due_at = due.at,
        hint_at = due.at
    from locked l, due
    where d.id = l.id and l.state = 'pending'
    returning d.id, d.state, d.fence, d.attempts, d.due_at
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, by_whom, reason, facts)
    select a.id, 'delivery', 'reschedule', a.state, a.state, a.fence, a.attempts, cast(:by as text),
        cast(:reason as text), jsonb_build_object('was_due_at', l.due_at, 'due_at', a.due_at)
    from acted a join locked l on l.id = a.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority, d.ordering_key,
    l.id is null as busy, a.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join acted a on a.id = d.id
where d.id = any (cast(:ids as uuid[]))

-- name: discard
-- before: dead or failed, and not discarded yet
-- after:  the same, given up by a person: it counts as a finding no more, holds up no line, and goes after its retention
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select d.id, d.state, d.discarded_at
    from durable.deliveries d
    where d.id = any (cast(:ids as uuid[]))
    order by d.id
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.deliveries d
    set discarded_at = clock.now
    from locked l, clock
    where d.id = l.id and l.state in ('dead', 'failed') and l.discarded_at is null
    returning d.id, d.state, d.fence, d.attempts
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, by_whom, reason)
    select a.id, 'delivery', 'discard', a.state, a.state, a.fence, a.attempts, cast(:by as text), cast(:reason as text)
    from acted a
)
select cast(d.id as text) as id, case when l.discarded_at is null then d.state else 'discarded' end as was,
    d.kind, d.queue, d.priority, d.ordering_key, l.id is null as busy, a.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join acted a on a.id = d.id
where d.id = any (cast(:ids as uuid[]))

-- name: release
-- before: held back by a sweep that failed on it
-- after:  the sweeps and the claims see it again; its state is what it was
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select d.id, d.state, d.fence, d.held_reason
    from durable.deliveries d
    where d.id = any (cast(:ids as uuid[]))
    order by d.id
    for no key update skip locked
),
acted as (
    update durable.deliveries d
    set held_reason = null
    from locked l
    where d.id = l.id and l.held_reason is not null
    returning d.id, d.state, d.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason, facts)
    select a.id, 'delivery', 'unhold', a.state, a.state, a.fence, cast(:by as text), cast(:reason as text),
        jsonb_build_object('held_reason', l.held_reason)
    from acted a join locked l on l.id = a.id
)
select cast(d.id as text) as id, d.state as was, d.kind, d.queue, d.priority, d.ordering_key,
    l.id is null as busy, a.id is not null as done
from durable.deliveries d
left join locked l on l.id = d.id
left join acted a on a.id = d.id
where d.id = any (cast(:ids as uuid[]))
