-- What a worker claims of an operation: once to issue its call, then again and again to poll it.

-- name: look
-- What a hint is about. Nothing is locked: the claim decides.
select cast(o.id as text) as id, o.kind, o.state, cast(o.arguments as text) as arguments, o.fence,
    cast(o.external_ids as text) as external_ids,
    o.due_at <= durable.durable_now() and o.start_before > durable.durable_now() and o.held_reason is null
        and not exists (
            select from durable.pauses p
            where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
              and p.name = case p.what when 'queue' then o.queue else o.kind end) as may_be_issued
from durable.operations o
where o.id = cast(:id as uuid) and o.kind = :kind

-- name: begin_precheck
-- before: queued
-- after:  known to be looked at now, so that an empty queue is no reason to hint it again; no claim, two may look
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select o.id
    from durable.operations o
    where o.id = cast(:id as uuid) and o.state = 'queued'
    for no key update skip locked
)
update durable.operations o
set beat_at = durable.durable_now()
from candidate c
where o.id = c.id

-- name: take
-- before: queued, due, of this kind; not held back, not paused, not too late
-- after:  running under fence 1, leased to this owner, who alone may issue the call, once; whoever comes later finds it
--         running, whatever became of this owner. The lease may be kept for as long as the ids may take to be recorded
--         after the call; the deadline that is told is the call's
-- locks:  the row, skipping it when somebody has it; no row back means there was nothing to take
with paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
),
candidate as materialized (
    select o.id, o.start_before
    from durable.operations o
    where o.id = cast(:id as uuid)
      and o.kind = :kind
      and o.state = 'queued'
      and o.held_reason is null
      and o.due_at <= (select durable.durable_now())
      and not exists (select from paused p where p.name = case p.what when 'queue' then o.queue else o.kind end)
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from candidate) as after_the_lock
),
taken as (
    update durable.operations o
    set state = 'running',
        fence = o.fence + 1,
        finds = :finds,
        cancels = :cancels,
        owner = :owner,
        owner_pid = :owner_pid,
        owner_host = :owner_host,
        issued_at = clock.now,
        claimed_at = clock.now,
        beat_at = clock.now,
        deadline_at = clock.now + make_interval(secs => cast(:timeout_seconds as float8) + :record_seconds),
        lease_expires_at = clock.now
            + make_interval(secs => least(:lease_seconds, cast(:timeout_seconds as float8) + :record_seconds)),
        patience_until = clock.now + make_interval(secs => o.patience_seconds),
        hints = 0,
        waiting_for = null,
        error_code = null,
        error_message = null
    from candidate c, clock
    where o.id = c.id and c.start_before > clock.now
    returning o.id, o.kind, o.fence, o.deadline_at, o.external_ids, o.external_statuses, o.finds, o.polls,
        cast(o.arguments as text) as arguments, o.owner_host, o.owner_pid
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, owner)
    select t.id, 'operation', 'take', 'queued', 'running', t.fence, t.owner_host || ':' || t.owner_pid
    from taken t
)
select cast(t.id as text) as id, t.kind, t.fence, t.deadline_at - make_interval(secs => :record_seconds) as deadline_at,
    t.arguments,
    cast(t.external_ids as text) as external_ids, cast(t.external_statuses as text) as external_statuses,
    t.finds, 1 as attempt, 1 as max_attempts, 0 as interruptions, 0 as max_interruptions, null as ordering_key
from taken t

-- name: take_again
-- before: running, issued, owned by nobody, and a poll or a look for its ids is due
-- after:  under a fence one higher, leased to this owner, who may ask the other side, and issue nothing; or failed, and
--         `failed` says so, where its patience is over. Patience that is over because our own poll was not made for a
--         while is renewed instead, once until the next good poll
-- locks:  the row, skipping it when somebody has it; no row back means there was nothing to take
with candidate as materialized (
    select o.id, o.due_at, o.patience_until, o.patience_seconds, o.outage_at
    from durable.operations o
    where o.id = cast(:id as uuid)
      and o.kind = :kind
      and o.state = 'running'
      and o.owner is null
      and o.held_reason is null
      and o.due_at <= (select durable.durable_now())
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from candidate) as after_the_lock
),
verdict as materialized (
    select c.id, clock.now, c.patience_until <= clock.now as is_over,
        c.outage_at is null
            and c.due_at <= clock.now - make_interval(secs => least(:outage_seconds, c.patience_seconds / 2)) as is_ours
    from candidate c, clock
),
failed as (
    update durable.operations o
    set state = 'failed',
        finished_at = v.now,
        error_code = case when o.external_ids is null then 'OUTCOME_UNKNOWN' else 'PATIENCE_OVER' end,
        error_message = case when o.external_ids is null
            then 'nobody could tell what became of the call' else 'the other side was silent for too long' end
    from verdict v
    where o.id = v.id and v.is_over and not v.is_ours
    returning o.*
),
taken as (
    update durable.operations o
    set fence = o.fence + 1,
        owner = :owner,
        owner_pid = :owner_pid,
        owner_host = :owner_host,
        claimed_at = v.now,
        beat_at = v.now,
        deadline_at = v.now + make_interval(secs => :timeout_seconds),
        lease_expires_at = v.now + make_interval(secs => least(:lease_seconds, :timeout_seconds)),
        patience_until = case when v.is_over
            then v.now + make_interval(secs => o.patience_seconds) else o.patience_until end,
        outage_at = case when v.is_over then v.now else o.outage_at end,
        hints = 0,
        waiting_for = null
    from verdict v
    where o.id = v.id and (not v.is_over or v.is_ours)
    returning o.*
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)
    select f.id, 'operation', 'poll', 'running', 'failed', f.fence, f.error_code from failed f
    union all
    select t.id, 'operation', 'outage', 'running', 'running', t.fence, 'OUTAGE'
    from taken t join verdict v on v.id = t.id
    where v.is_over
)
select cast(r.id as text) as id, r.kind, r.fence, coalesce(r.deadline_at, r.finished_at) as deadline_at,
    cast(r.arguments as text) as arguments, cast(r.external_ids as text) as external_ids,
    cast(r.external_statuses as text) as external_statuses, r.finds,
    r.state = 'failed' as failed, r.error_code, r.error_message,
    r.claimed_at < r.issued_at + make_interval(secs => least(:arrival_seconds, r.patience_seconds / 2)) as may_arrive,
    1 as attempt, 1 as max_attempts, 0 as interruptions, 0 as max_interruptions, null as ordering_key
from (select t.* from taken t union all select f.* from failed f) as r

-- name: keep
-- before: running under these fences, the deadline ahead
-- after:  the lease runs anew, never past the deadline
-- locks:  the rows, skipping those that are locked
with bounds as materialized (
    select set_config('synchronous_commit',
        case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as set
),
held as materialized (
    select h.id, h.fence
    from unnest(cast(:ids as uuid[]), cast(:fences as bigint[])) as h (id, fence)
),
mine as materialized (
    select o.id
    from bounds b, durable.operations o
    join held h on h.id = o.id and h.fence = o.fence
    where o.state = 'running' and o.owner is not null and o.deadline_at > (select durable.durable_now())
    order by o.id
    for no key update of o skip locked
),
clock as materialized (
    select durable.durable_now() as now
),
kept as (
    update durable.operations o
    set lease_expires_at = least(clock.now + make_interval(secs => :lease_seconds), o.deadline_at),
        beat_at = clock.now
    from mine m, clock
    where o.id = m.id
    returning o.id
)
select h.id, h.fence,
    exists (select from kept k where k.id = h.id) as kept,
    exists (
        select from durable.operations o
        where o.id = h.id and o.fence = h.fence and (o.settled_fence = h.fence or o.state = 'running')
    ) as still_ours
from held h

-- name: refuse
-- before: queued; its pre-check said no
-- after:  failed with what it said, its slot free; nothing was ever issued
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select o.id, o.fence
    from durable.operations o
    where o.id = cast(:id as uuid) and o.state = 'queued'
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from candidate) as after_the_lock
),
refused as (
    update durable.operations o
    set state = 'failed',
        finished_at = clock.now,
        waiting_for = null,
        error_code = :error_code,
        error_message = :error_message
    from candidate c, clock
    where o.id = c.id
    returning o.id, o.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)
    select r.id, 'operation', 'refuse', 'queued', 'failed', r.fence, cast(:error_code as text) from refused r
)
select r.id from refused r

-- name: put_off
-- before: queued, and a worker could not yet look at it, or has no code that takes its arguments
-- after:  queued and due a little later, with the reason for people
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select o.id
    from durable.operations o
    where o.id = cast(:id as uuid) and o.state = 'queued'
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from candidate) as after_the_lock
)
update durable.operations o
set due_at = clock.now + make_interval(secs => :delay_seconds),
    hint_at = clock.now + make_interval(secs => :delay_seconds),
    hints = 0,
    waiting_for = :waiting_for,
    error_code = :error_code,
    error_message = :error_message
from candidate c, clock
where o.id = c.id
returning o.due_at

-- name: wait_for_handler
-- before: not ended, and hinted to a worker that does not know its kind
-- after:  says so, for people; it is hinted again a little later, and the next claim clears the remark
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select o.id
    from durable.operations o
    where o.id = cast(:id as uuid) and o.kind = :kind and o.state in ('queued', 'running') and o.owner is null
    for no key update skip locked
)
update durable.operations o
set waiting_for = 'handler',
    hint_at = greatest(o.hint_at, durable.durable_now() + make_interval(secs => :delay_seconds))
from candidate c
where o.id = c.id
returning o.id

-- name: lock_canceled
-- before: canceled
-- after:  nothing changes; `ask_to_cancel` in the same transaction sees what whoever had it before has written
-- locks:  the row, skipping it when somebody has it
select cast(o.id as text) as id
from durable.operations o
where o.id = cast(:id as uuid) and o.kind = :kind and o.state = 'canceled'
for no key update skip locked

-- name: ask_to_cancel
-- before: locked by `lock_canceled` in this transaction
-- after:  a line says that the other side is asked to stop; no row back means that somebody asked before
insert into durable.journal (row_id, contract, move, from_state, to_state, fence)
select o.id, 'operation', 'ask to cancel', o.state, o.state, o.fence
from durable.operations o
where o.id = cast(:id as uuid) and o.issued_at is not null and not exists (
    select from durable.journal j where j.row_id = o.id and j.move = 'ask to cancel')
returning row_id
