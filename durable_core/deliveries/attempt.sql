-- One attempt at a delivery, in the order of its life: take, keep, lock, settle; or release.

-- name: take
-- before: pending, due, of this kind; not held back, not expired, not paused, the first of its line
-- after:  processing under a fence one higher, leased to this owner, the attempt counted
-- locks:  the row, skipping it when somebody has it; no row back means there was nothing to take. An error of
--         `deliveries_one_of_a_line` means the same: another of its line was taken at this very moment
with paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
),
candidate as materialized (
    select d.id
    from durable.deliveries d
    where d.id = cast(:id as uuid)
      and d.kind = any (cast(:kinds as text[]))
      and d.state = 'pending'
      and d.held_reason is null
      and d.due_at <= (select durable.durable_now())
      and (d.expires_at is null or d.expires_at > (select durable.durable_now()))
      and not exists (select from paused p where p.name = case p.what when 'queue' then d.queue else d.kind end)
      and (d.ordering_key is null
          or not durable.is_behind(d.id, d.ordering_key, d.created_at, d.attempts > 0, (select durable.durable_now())))
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now
)
update durable.deliveries d
set state = 'processing',
    fence = d.fence + 1,
    attempts = d.attempts + 1,
    max_attempts = :max_attempts,
    max_interruptions = :max_interruptions,
    owner = :owner,
    owner_pid = :owner_pid,
    owner_host = :owner_host,
    claimed_at = clock.now,
    beat_at = clock.now,
    deadline_at = clock.now + make_interval(secs => :timeout_seconds),
    lease_expires_at = clock.now + make_interval(secs => least(:lease_seconds, :timeout_seconds)),
    waiting_for = null
from candidate c, clock
where d.id = c.id
returning d.id, d.kind, d.fence, d.interruptions, d.max_attempts, d.max_interruptions, d.deadline_at, d.ordering_key,
    d.attempts - d.interruptions - d.shutdowns - d.snoozes as attempt,
    cast(d.arguments as text) as arguments

-- name: known
-- Whether a row of this id is here at all, whatever became of it.
select d.state from durable.deliveries d where d.id = cast(:id as uuid)

-- name: take_due
-- before: pending and due in this queue, of a kind named in the terms; otherwise as for `take`
-- after:  as take, the most overdue first, never more than asked for
-- locks:  the rows taken, skipping what others hold; the error that `take` names refuses all of them
with paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
),
terms as materialized (
    select t.*
    from jsonb_to_recordset(cast(:terms as jsonb))
        as t (kind text, timeout_seconds float8, max_attempts integer, max_interruptions integer)
),
candidate as materialized (
    select d.id
    from durable.deliveries d
    where d.queue = :queue
      and d.state = 'pending'
      and d.held_reason is null
      and d.due_at <= (select durable.durable_now())
      and (d.expires_at is null or d.expires_at > (select durable.durable_now()))
      and d.kind = any (array(select t.kind from terms t))
      and not exists (select from paused p where p.name = case p.what when 'queue' then d.queue else d.kind end)
      and (d.ordering_key is null
          or not durable.is_behind(d.id, d.ordering_key, d.created_at, d.attempts > 0, (select durable.durable_now())))
    order by d.due_at, d.created_at
    limit :limit
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now
),
taken as (
    update durable.deliveries d
    set state = 'processing',
        fence = d.fence + 1,
        attempts = d.attempts + 1,
        max_attempts = t.max_attempts,
        max_interruptions = t.max_interruptions,
        owner = :owner,
        owner_pid = :owner_pid,
        owner_host = :owner_host,
        claimed_at = clock.now,
        beat_at = clock.now,
        deadline_at = clock.now + make_interval(secs => t.timeout_seconds),
        lease_expires_at = clock.now + make_interval(secs => least(:lease_seconds, t.timeout_seconds)),
        waiting_for = null
    from candidate c, clock, terms t
    where d.id = c.id and t.kind = d.kind
    returning d.id, d.kind, d.fence, d.interruptions, d.max_attempts, d.max_interruptions, d.deadline_at, d.ordering_key,
        d.due_at, d.created_at,
        d.attempts - d.interruptions - d.shutdowns - d.snoozes as attempt,
        cast(d.arguments as text) as arguments
)
select t.* from taken t order by t.due_at, t.created_at

-- name: keep
-- before: processing under these fences, the deadline ahead
-- after:  the lease runs anew, never past the deadline
-- locks:  the rows, skipping those that are locked: their holder is this process's own step, or about to decide
with bounds as materialized (
    -- A beat is worth less than its wait: with the standby gone, leases must not lapse. What a failover takes back of
    -- it is time.
    select set_config('synchronous_commit',
        case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as set
),
held as materialized (
    select h.id, h.fence
    from unnest(cast(:ids as uuid[]), cast(:fences as bigint[])) as h (id, fence)
),
mine as materialized (
    select d.id
    from bounds b, durable.deliveries d
    join held h on h.id = d.id and h.fence = d.fence
    where d.state = 'processing' and d.deadline_at > (select durable.durable_now())
    order by d.id
    for no key update of d skip locked
),
clock as materialized (
    select durable.durable_now() as now
),
kept as (
    update durable.deliveries d
    set lease_expires_at = least(clock.now + make_interval(secs => :lease_seconds), d.deadline_at),
        beat_at = clock.now
    from mine m, clock
    where d.id = m.id
    returning d.id
)
select h.id, h.fence,
    exists (select from kept k where k.id = h.id) as kept,
    exists (
        select from durable.deliveries d
        where d.id = h.id and d.fence = h.fence
            -- Settled under this fence: by this very attempt, whose commit came between two beats.
            and (d.settled_fence = h.fence or d.state in ('processing', 'pending'))
    ) as still_ours
from held h

-- name: lock
-- before: a transaction of ours has just begun; the row processing, or pending after a reap, under this fence, unsettled
-- after:  nobody else can take, reap or cancel it until this transaction ends; the session bears the name of the row
--         and the fence as long; no lock is waited for longer than it is told, until then or until `unbound`
-- locks:  the row, first of all in its transaction and outside any savepoint; no row back means the claim is lost
with bound as materialized (
    select current_setting('lock_timeout') as was, set_config('lock_timeout', :lock_timeout, true) as set,
        -- By this name a sweep knows whose lock it is, should it outlive the deadline.
        set_config('application_name', concat('durable ', cast(:id as text), ' ', cast(:fence as bigint)), true) as named
)
select d.state,
    case when d.state = 'pending' then d.error_code end as reaped_as,
    cast(pg_current_xact_id() as text) as xid,
    b.was as lock_timeout_was
from bound b, durable.deliveries d
where d.id = cast(:id as uuid)
  and d.fence = :fence
  and d.settled_fence < :fence
  and d.state in ('processing', 'pending')
for no key update of d

-- name: unbound
-- after:  the session's own bound again, for the time that user code has the transaction
select set_config('lock_timeout', :was, true) as set

-- name: settle
-- before: locked by `lock` in this very transaction
-- after:  sent, with its result as the receipt; what a reap or the parent booked for this claim is taken back
-- locks:  the row, held already
-- A division by zero ends the transaction when the row was not settled: an effect never commits without its receipt.
with settled as (
    update durable.deliveries d
    set state = 'sent',
        settled_fence = :fence,
        interruptions = d.interruptions - cast(:interruptions_booked as integer),
        shutdowns = d.shutdowns - cast(:shutdowns_booked as integer),
        result = cast(:result as jsonb),
        held_reason = null,
        error_code = null,
        error_message = null,
        owner = null,
        lease_expires_at = null,
        deadline_at = null,
        finished_at = durable.durable_now()
    where d.id = cast(:id as uuid)
      and d.fence = :fence
      and d.settled_fence < :fence
      and d.state in ('processing', 'pending')
      and cast(pg_current_xact_id() as text) = :xid
    returning d.id, d.fence, d.attempts
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt)
    select s.id,
        'delivery', 'settle late', 'pending', 'sent', s.fence, s.attempts
    from settled s
    where cast(:late as boolean)
)
select 1 / count(*) as settled from settled

-- name: settle_alone
-- before: as for `lock`; the attempt has nothing to write but its receipt
-- after:  as after `lock` and `settle`; no row back means the claim is lost
-- locks:  the row, waiting no longer than it is told; under the name that `lock` gives the session
with bound as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set,
        set_config('application_name', concat('durable ', cast(:id as text), ' ', cast(:fence as bigint)), true) as named
),
locked as materialized (
    select d.id, d.state = 'pending' as late, case when d.state = 'pending' then d.error_code end as reaped_as
    from bound, durable.deliveries d
    where d.id = cast(:id as uuid)
      and d.fence = :fence
      and d.settled_fence < :fence
      and d.state in ('processing', 'pending')
    for no key update of d
),
settled as (
    update durable.deliveries d
    set state = 'sent',
        settled_fence = :fence,
        interruptions = d.interruptions - cast(coalesce(l.reaped_as = any (:interrupted_as), false) as integer),
        shutdowns = d.shutdowns - cast(coalesce(l.reaped_as = 'SHUTDOWN', false) as integer),
        result = cast(:result as jsonb),
        held_reason = null,
        error_code = null,
        error_message = null,
        owner = null,
        lease_expires_at = null,
        deadline_at = null,
        finished_at = durable.durable_now()
    from locked l
    where d.id = l.id
    returning d.id, d.fence, d.attempts, l.late
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt)
    select s.id,
        'delivery', 'settle late', 'pending', 'sent', s.fence, s.attempts
    from settled s
    where s.late
)
select s.fence from settled s

-- name: current
-- The fence that refused us, for a sentence; nothing is locked.
select d.fence from durable.deliveries d where d.id = cast(:id as uuid)

-- name: remark_stale
-- before: this fence was held once, and its report was refused
-- after:  one journal line says what the refused owner had to report; the row is untouched
-- locks:  the row against its deletion only, for whoever has it now may be at work in it; one that is being pruned is
--         skipped, or the line would outlive its row
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, facts)
select d.id, 'delivery', 'refused', d.state, d.state, :fence, cast(:reason as text),
    jsonb_build_object('reported', cast(:reported as text), 'current_fence', d.fence)
from durable.deliveries d
where d.id = cast(:id as uuid) and d.fence >= :fence
for key share skip locked

-- name: wait_for_handler
-- before: pending, hinted to a worker that does not know its kind
-- after:  says so, for people; dispatch hints it again a little later, and the next claim clears the remark
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select d.id
    from durable.deliveries d
    where d.id = cast(:id as uuid) and d.kind = :kind and d.state = 'pending'
    for no key update skip locked
)
update durable.deliveries d
set waiting_for = 'handler',
    -- Each hint costs Celery a screen of log: not one a second for as long as the kind is misspelt.
    hint_at = greatest(d.hint_at, durable.durable_now() + make_interval(secs => :delay_seconds))
from candidate c
where d.id = c.id
returning d.id
