-- What a person, or the application, does to operations. Each statement takes one id or several; each locks what it
-- moves, skipping what others hold. None issues a call: nothing may issue one again. A row `was` what it is under its
-- lock: the statement's snapshot may be older.

-- name: cancel
-- before: queued, or running
-- after:  canceled under a fence one higher: whoever calls or polls is refused, and the slot is free; the other side may
--         still finish what it began
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select o.id, o.state, o.owner, o.owner_host, o.owner_pid, o.lease_expires_at
    from durable.operations o
    where o.id = any (cast(:ids as uuid[]))
    order by o.id
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.operations o
    set state = 'canceled',
        fence = o.fence + 1,
        settled_fence = o.fence + 1,
        finished_at = clock.now,
        canceled_by = :by,
        canceled_reason = :reason,
        owner = null,
        lease_expires_at = null,
        deadline_at = null,
        waiting_for = null,
        held_reason = null
    from locked l, clock
    where o.id = l.id and l.state in ('queued', 'running')
    returning o.id, o.state, o.fence
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, owner, by_whom, reason, lease_before)
    select a.id, 'operation', 'cancel', l.state, a.state, a.fence,
        case when l.owner is not null then l.owner_host || ':' || l.owner_pid end,
        cast(:by as text), cast(:reason as text), l.lease_expires_at
    from acted a join locked l on l.id = a.id
)
select cast(o.id as text) as id, coalesce(l.state, o.state) as was, o.kind, o.queue, o.priority,
    o.external_ids is not null as known, l.id is null as busy, a.id is not null as done
from durable.operations o
left join locked l on l.id = o.id
left join acted a on a.id = o.id
where o.id = any (cast(:ids as uuid[]))

-- name: poll
-- before: running, not held back, and nobody asks the other side just now
-- after:  its poll is due now; nothing else of it changes
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select o.id, o.state, o.owner, o.held_reason
    from durable.operations o
    where o.id = any (cast(:ids as uuid[]))
    order by o.id
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.operations o
    set due_at = least(o.due_at, clock.now),
        hint_at = clock.now,
        hints = 0
    from locked l, clock
    where o.id = l.id and l.state = 'running' and l.owner is null and l.held_reason is null
    returning o.id, o.state, o.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason)
    select a.id, 'operation', 'ask for a poll', a.state, a.state, a.fence, cast(:by as text), cast(:reason as text)
    from acted a
)
select cast(o.id as text) as id,
    case when l.state = 'running' and l.held_reason is not null then 'held back'
        else coalesce(l.state, o.state) end as was,
    o.kind, o.queue, o.priority, o.external_ids is not null as known,
    l.id is null or (l.state = 'running' and l.owner is not null and l.held_reason is null) as busy,
    a.id is not null as done
from durable.operations o
left join locked l on l.id = o.id
left join acted a on a.id = o.id
where o.id = any (cast(:ids as uuid[]))

-- name: release
-- before: held back by a sweep that failed on it
-- after:  the sweeps and the claims see it again; its state is what it was
-- locks:  the rows, skipping those that somebody has
with locked as materialized (
    select o.id, o.state, o.fence, o.held_reason
    from durable.operations o
    where o.id = any (cast(:ids as uuid[]))
    order by o.id
    for no key update skip locked
),
acted as (
    update durable.operations o
    set held_reason = null
    from locked l
    where o.id = l.id and l.held_reason is not null
    returning o.id, o.state, o.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason, facts)
    select a.id, 'operation', 'unhold', a.state, a.state, a.fence, cast(:by as text), cast(:reason as text),
        jsonb_build_object('held_reason', l.held_reason)
    from acted a join locked l on l.id = a.id
)
select cast(o.id as text) as id, coalesce(l.state, o.state) as was, o.kind, o.queue, o.priority,
    o.external_ids is not null as known, l.id is null as busy, a.id is not null as done
from durable.operations o
left join locked l on l.id = o.id
left join acted a on a.id = o.id
where o.id = any (cast(:ids as uuid[]))
