-- What a person decides about a plan. Each locks its row, skipping it when somebody has it: nobody waits for a sweep,
-- nor for another's open transaction.

-- name: approve
-- before: pending and not held back, its consent ahead by the clock as it is once the row is locked; the digest is what is approved
-- after:  approved by somebody, as it was shown; a hint of its first step is on its way
-- locks:  the row; `busy` where somebody has it
with locked as materialized (
    select p.id, p.state, p.digest = :digest as same, p.expires_at, p.self_approval or p.proposed_by <> :by as may,
        p.held_reason is not null as held
    from durable.plans p
    where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.plans p
    set state = 'approved',
        approved_by = :by,
        approved_at = clock.now,
        approved_digest = :digest,
        hint_at = clock.now + interval '10 s',
        hints = 0
    from locked l, clock
    where p.id = l.id and l.state = 'pending' and not l.held and l.same and l.may and l.expires_at > clock.now
    returning p.id, p.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason, facts)
    select a.id, 'plan', 'approve', 'pending', 'approved', a.fence, cast(:by as text), cast(:reason as text),
        jsonb_build_object('digest', cast(:digest as text))
    from acted a
)
select cast(p.id as text) as id, p.kind, p.queue, p.priority, p.expires_at, l.state as was, l.same, l.may, l.held,
    l.expires_at <= clock.now as over, l.id is null as busy, a.id is not null as done
from clock, durable.plans p
left join locked l on l.id = p.id
left join acted a on a.id = p.id
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))

-- name: reject
-- before: pending
-- after:  rejected, with who and why
-- locks:  the row; `busy` where somebody has it
with locked as materialized (
    select p.id, p.state, p.expires_at
    from durable.plans p
    where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
acted as (
    update durable.plans p
    set state = 'rejected',
        rejected_by = :by,
        rejected_reason = cast(:reason as text),
        finished_at = clock.now
    from locked l, clock
    where p.id = l.id and l.state = 'pending' and l.expires_at > clock.now
    returning p.id, p.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason)
    select a.id, 'plan', 'reject', 'pending', 'rejected', a.fence, cast(:by as text), cast(:reason as text)
    from acted a
)
select cast(p.id as text) as id, p.expires_at, l.state as was, l.expires_at <= clock.now as over, l.id is null as busy,
    a.id is not null as done
from clock, durable.plans p
left join locked l on l.id = p.id
left join acted a on a.id = p.id
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))

-- name: release
-- before: held back by a sweep that failed on it
-- after:  the sweeps see it again
-- locks:  the row; `busy` where somebody has it
with locked as materialized (
    select p.id, p.state, p.held_reason
    from durable.plans p
    where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
    for no key update skip locked
),
acted as (
    update durable.plans p
    set held_reason = null
    from locked l
    where p.id = l.id and l.held_reason is not null and l.state in ('pending', 'approved', 'executing')
    returning p.id, p.state, p.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, by_whom, reason, facts)
    select a.id, 'plan', 'release', a.state, a.state, a.fence, cast(:by as text), cast(:reason as text),
        jsonb_build_object('held', l.held_reason)
    from acted a join locked l on l.id = a.id
)
select cast(p.id as text) as id, l.state as was, l.id is null as busy, a.id is not null as done
from durable.plans p
left join locked l on l.id = p.id
left join acted a on a.id = p.id
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
