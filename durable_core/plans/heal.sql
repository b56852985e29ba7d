-- What time alone decides about plans: by a sweep, or as one of them is read.

-- name: stale
-- before: executing, claimed and its lease over, or nobody's and not continued in time
-- after:  locked, for `heal` in the same transaction; the longest over first, so many of each
-- locks:  the rows, skipping those that are locked: while a row is locked its holder is alive
with silent as materialized (
    select p.id, p.fence, p.lease_expires_at as until
    from durable.plans p
    where p.state = 'executing'
      and p.owner > ''
      and p.held_reason is null
      and p.lease_expires_at <= (select durable.durable_now())
    order by p.lease_expires_at
    limit :limit
    for no key update skip locked
),
left_alone as materialized (
    select p.id, p.fence, p.continue_until as until
    from durable.plans p
    where p.state = 'executing'
      and p.owner is null
      and p.held_reason is null
      and p.continue_until <= (select durable.durable_now())
    order by p.continue_until
    limit :limit
    for no key update skip locked
)
select cast(l.id as text) as id, l.fence
from (select * from silent union all select * from left_alone) as l
where l.until <= durable.durable_now()

-- name: stale_one
-- before: the same of one plan
-- after:  locked, for `heal` in the same transaction
-- locks:  the row, skipping it while it is locked
with locked as materialized (
    select p.id, p.fence, coalesce(p.lease_expires_at, p.continue_until) as until
    from durable.plans p
    where p.id = cast(:id as uuid)
      and p.state = 'executing'
      and p.held_reason is null
      and coalesce(p.lease_expires_at, p.continue_until) <= (select durable.durable_now())
      -- A read that comes before the reap of an outage leaves owners the time to beat, as that does.
      and not exists (
          select from durable.loops l where l.name = 'reap' and l.hold_until > (select durable.durable_now()))
    for no key update skip locked
)
select cast(l.id as text) as id, l.fence
from locked l
where l.until <= durable.durable_now()

-- name: heal
-- before: locked by `stale`, `stale_one` or `owned` in this transaction
-- after:  executed, if all its receipts are there; else failed, interrupted. Nothing of it runs again
-- locks:  the rows, held already
with healed as (
    update durable.plans p
    set state = case when p.receipts = p.step_count then 'executed' else 'failed' end,
        error_code = case when p.receipts = p.step_count then null else 'INTERRUPTED' end,
        error_message = case
            when p.receipts = p.step_count then null
            when b.owner is null
                then format('nobody went on with step %s of %s in time', p.receipts + 1, p.step_count)
            else format('the worker was lost inside step %s of %s; nothing of that step stands',
                p.receipts + 1, p.step_count)
        end,
        finished_at = clock.now,
        waiting_for = null,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from (select durable.durable_now() as now) as clock, durable.plans b
    where b.id = p.id and p.id = any (cast(:ids as uuid[])) and p.state = 'executing'
    returning p.id, p.state, p.fence, p.receipts, p.error_code, p.owner_host, p.owner_pid, b.owner as owner_before,
        b.lease_expires_at as lease_before
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, lease_before)
    select h.id, 'plan', cast(:move as text), 'executing', h.state, h.fence, h.receipts + 1,
        case when h.owner_before is not null then h.owner_host || ':' || h.owner_pid end, h.error_code, h.lease_before
    from healed h
)
select cast(h.id as text) as id, h.state from healed h

-- name: overdue
-- before: pending or approved, its consent over by the database's clock
-- after:  locked, for `expire` in the same transaction; the longest over first
-- locks:  the rows, skipping what others hold
with locked as materialized (
    select p.id, p.fence, p.expires_at
    from durable.plans p
    where p.state in ('pending', 'approved')
      and p.held_reason is null
      and p.expires_at <= (select durable.durable_now())
    order by p.expires_at
    limit :limit
    for no key update skip locked
)
select cast(l.id as text) as id, l.fence
from locked l
where l.expires_at <= durable.durable_now()

-- name: overdue_one
-- before: the same of one plan
-- after:  locked, for `expire` in the same transaction
-- locks:  the row, skipping it when somebody has it
with locked as materialized (
    select p.id, p.fence, p.expires_at
    from durable.plans p
    where p.id = cast(:id as uuid)
      and p.state in ('pending', 'approved')
      and p.held_reason is null
      and p.expires_at <= (select durable.durable_now())
    for no key update skip locked
)
select cast(l.id as text) as id, l.fence
from locked l
where l.expires_at <= durable.durable_now()

-- name: expire
-- before: locked by `overdue` or `overdue_one` in this transaction
-- after:  expired: it can never run
-- locks:  the rows, held already
with expired as (
    update durable.plans p
    set state = 'expired',
        error_code = 'EXPIRED',
        error_message = case b.state
            when 'approved' then 'it was approved, and did not start before its consent was over'
            else 'nobody approved it in time' end,
        finished_at = clock.now,
        waiting_for = null
    from (select durable.durable_now() as now) as clock, durable.plans b
    where b.id = p.id and p.id = any (cast(:ids as uuid[])) and p.state in ('pending', 'approved')
    returning p.id, p.fence, p.expires_at, b.state as was
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, facts)
    select e.id, 'plan', 'expire', e.was, 'expired', e.fence, 'EXPIRED', jsonb_build_object('expires_at', e.expires_at)
    from expired e
)
select cast(e.id as text) as id from expired e

-- name: hold
-- before: under this fence, and a sweep failed on it
-- after:  it stays where it is, says why, and no sweep touches it until its owner reports or an operator releases it
-- locks:  the row
with held as (
    update durable.plans p
    set held_reason = :reason
    where p.id = cast(:id as uuid) and p.fence = :fence and p.held_reason is null
    returning p.id, p.state, p.fence
)
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)
select h.id, 'plan', 'hold', h.state, h.state, h.fence, cast(:reason as text)
from held h
