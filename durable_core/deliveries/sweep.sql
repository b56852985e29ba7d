-- name: due_queues
-- The queues that have a due row, found by skipping from one to the next: the cost is the number of queues.
select q.queue from durable.due_queues() as q (queue)

-- name: due
-- How many rows are due in each of these queues, counted up to a limit.
select q.queue, w.rows
from unnest(cast(:queues as text[])) as q (queue)
cross join lateral (
    select cast(count(*) as integer) as rows
    from (
        select from durable.deliveries d
        where d.state = 'pending' and d.queue = q.queue and d.hint_at <= (select durable.durable_now())
        limit :limit
    ) as window_of_due
) as w
where w.rows > 0

-- name: unhinted
-- before: due rows, and the number of hints that lie in each queue
-- after:  as many as bring each queue to min(due, cap), the longest unhinted first, for `mark` in the same transaction;
--         those that nobody may take now, for a pause or for one of their line that goes before them, as `idle`
-- locks:  these rows, skipping what others hold
with queue as materialized (
    select q.queue, q.depth, q.cap
    from jsonb_to_recordset(cast(:depths as jsonb)) as q (queue text, depth integer, cap integer)
),
paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
)
select cast(p.id as text) as id, p.fence, p.kind, q.queue, p.priority, p.first, p.attempt,
    exists (select from paused s where s.name = case s.what when 'queue' then q.queue else p.kind end)
    or (p.ordering_key is not null
        and durable.is_behind(p.id, p.ordering_key, p.created_at, p.attempts > 0, (select durable.durable_now()))
    ) as idle
from queue q
cross join lateral (
    select count(*) as rows
    from (
        select from durable.deliveries d
        where d.state = 'pending' and d.queue = q.queue and d.hint_at <= (select durable.durable_now())
        limit q.cap
    ) as window_of_due
) as due
cross join lateral (
    -- Never claimed nor hinted: this hint may go by the row's own id. A row that was due at once was hinted by
    -- its caller's commit, and two tasks of one id would hide each other in Flower.
    select d.id, d.fence, d.kind, d.priority, d.ordering_key, d.created_at, d.attempts,
        d.attempts = 0 and d.hint_at = d.due_at and d.due_at > d.created_at as first,
        d.attempts - d.interruptions - d.shutdowns - d.snoozes + 1 as attempt
    from durable.deliveries d
    where d.state = 'pending' and d.queue = q.queue and d.hint_at <= (select durable.durable_now())
      and d.held_reason is null
    order by d.hint_at
    limit greatest(least(due.rows, q.cap) - q.depth, 0)
    for no key update skip locked
) as p

-- name: mark
-- before: locked by `unhinted` in this transaction
-- after:  hinted now, for other rows to have their turn, and the idle ones looked at again a little later; it decides
--         nothing, so a lost mark costs one more hint
-- locks:  the rows, held already
update durable.deliveries d
set hint_at = clock.now + make_interval(secs => case when d.id = any (cast(:idle as uuid[])) then :idle_seconds else 0 end)
from (
    select durable.durable_now() as now,
        -- A mark that a failover takes back costs one more hint; it does not wait for a standby.
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated
) as clock
where d.id = any (cast(:ids as uuid[]))

-- name: lapsed
-- before: processing, the lease over by the database's clock
-- after:  locked, for `reap` in the same transaction to decide; oldest lease first, or a backlog would starve them
-- locks:  the rows, skipping those that are locked: while a row is locked its holder is alive
with locked as materialized (
    select d.id, d.kind, d.fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes, d.max_attempts,
        d.max_interruptions, d.lease_expires_at, d.deadline_at, d.beat_at
    from durable.deliveries d
    where d.state = 'processing'
      and d.held_reason is null
      and d.lease_expires_at <= (select durable.durable_now())
    order by d.lease_expires_at
    limit :limit
    for no key update skip locked
)
select l.id, l.kind, l.fence, l.interruptions, l.max_attempts, l.max_interruptions,
    l.attempts - l.interruptions - l.shutdowns - l.snoozes as attempt,
    -- An owner that still beat shortly before its deadline was alive and ran out of time: a
    -- failure. One that fell silent before was lost: an interruption. Two heartbeats, for beats
    -- come a little further apart than one: the last may have been due just after the deadline.
    l.deadline_at <= durable.durable_now()
        and l.beat_at >= l.deadline_at - 2 * make_interval(secs => :heartbeat_seconds) as timed_out
from locked l
where l.lease_expires_at <= durable.durable_now()

-- name: holding_pids
-- The processes of this owner that hold a delivery.
select distinct d.owner_pid as pid from durable.deliveries d where d.state = 'processing' and d.owner = :owner

-- name: owned
-- before: processing under this owner, in a process of it that has died
-- after:  locked, for `reap` in the same transaction to decide, without waiting for the lease
-- locks:  the rows, skipping those that are locked: the dead process's backend may not have noticed yet
with locked as materialized (
    select d.id, d.kind, d.fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes, d.max_attempts,
        d.max_interruptions, d.deadline_at
    from durable.deliveries d
    where d.state = 'processing' and d.held_reason is null and d.owner = :owner
      and d.owner_pid = any (cast(:pids as integer[]))
    order by d.id
    for no key update skip locked
)
select l.id, l.kind, l.fence, l.interruptions, l.max_attempts, l.max_interruptions,
    l.attempts - l.interruptions - l.shutdowns - l.snoozes as attempt,
    -- Killed at its deadline, by the hard limit: a failure. Killed before: an interruption.
    l.deadline_at <= durable.durable_now() as timed_out
from locked l

-- name: reap
-- before: locked by `lapsed` or `owned` in this transaction
-- after:  pending and due again, or dead; one interruption, shutdown or failure counted; the fence untouched, so
--         that a late report on a row that nobody took meanwhile still lands
-- locks:  the rows, held already
with verdict as materialized (
    select v.*
    from jsonb_to_recordset(cast(:verdicts as jsonb)) as v (
        id uuid, fence bigint, state text, delay_seconds float8, counted text, error_code text,
        error_message text)
),
clock as materialized (
    select durable.durable_now() as now
),
reaped as (
    update durable.deliveries d
    set state = v.state,
        interruptions = d.interruptions + cast(v.counted = 'interruption' as integer),
        shutdowns = d.shutdowns + cast(v.counted = 'shutdown' as integer),
        due_at = case when v.state = 'pending'
            then clock.now + make_interval(secs => v.delay_seconds) else d.due_at end,
        hint_at = case when v.state = 'pending'
            then clock.now + make_interval(secs => v.delay_seconds) else d.hint_at end,
        finished_at = case when v.state = 'pending' then null else clock.now end,
        error_code = v.error_code,
        error_message = v.error_message,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from verdict v, clock,
        lateral (select b.lease_expires_at from durable.deliveries b where b.id = v.id) as before
    where d.id = v.id and d.fence = v.fence and d.state = 'processing'
    returning d.id, d.kind, d.state, d.fence, d.attempts, d.owner_host, d.owner_pid, d.due_at,
        d.error_code, before.lease_expires_at as lease_before
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, facts, lease_before)
    select r.id,
        'delivery', cast(:move as text), 'processing', r.state, r.fence, r.attempts,
        r.owner_host || ':' || r.owner_pid, r.error_code, jsonb_build_object('due_at', r.due_at),
        r.lease_before
    from reaped r
)
select cast(r.id as text) as id, r.kind, r.state, r.error_code from reaped r

-- name: hold
-- before: in this state under this fence, and a sweep failed on it
-- after:  it stays where it is, says why, and no sweep touches it until its owner reports or an operator releases it
-- locks:  the row
with held as (
    update durable.deliveries d
    set held_reason = :reason
    where d.id = cast(:id as uuid) and d.fence = :fence and d.state = :state and d.held_reason is null
    returning d.id, d.state, d.fence, d.attempts
)
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, reason)
select h.id,
    'delivery', 'hold', h.state, h.state, h.fence, h.attempts, cast(:reason as text)
from held h

-- name: overdue
-- before: pending, its time to be useful over by the database's clock
-- after:  locked, for `expire` in the same transaction; the longest over first
-- locks:  the rows, skipping what others hold
select cast(d.id as text) as id, d.fence, d.kind, d.ordering_key
from durable.deliveries d
where d.state = 'pending'
  and d.held_reason is null
  and d.expires_at <= (select durable.durable_now())
order by d.expires_at
limit :limit
for no key update skip locked

-- name: expire
-- before: locked by `overdue` in this transaction
-- after:  expired; the fence untouched, and nobody can report any more, for it is terminal
-- locks:  the rows, held already
with expired as (
    update durable.deliveries d
    set state = 'expired',
        finished_at = clock.now,
        waiting_for = null
    from (select durable.durable_now() as now) as clock
    where d.id = any (cast(:ids as uuid[])) and d.state = 'pending' and d.expires_at <= clock.now
    returning d.id, d.fence, d.attempts, d.expires_at
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, reason, facts)
    select e.id, 'delivery', 'expire', 'pending', 'expired', e.fence, e.attempts, 'EXPIRED',
        jsonb_build_object('expires_at', e.expires_at)
    from expired e
)
select cast(e.id as text) as id from expired e

-- name: discarded
-- before: failed or dead, and discarded by a person longer ago than the retention
-- after:  locked, for `prune` in the same transaction
-- locks:  the rows, skipping what others hold
select cast(d.id as text) as id, d.discarded_at as finished_at
from durable.deliveries d
where d.discarded_at <= (select durable.durable_now() - make_interval(secs => :retention_seconds))
  and d.discarded_at >= coalesce(cast(:since as timestamptz), '-infinity')
  and d.id <> all (cast(:without as uuid[]))
order by d.discarded_at
limit :limit
for update skip locked

-- name: old
-- before: sent, canceled or expired, longer ago than the retention; by when it ended, not when it was created
-- after:  locked, for `prune` in the same transaction
-- locks:  the rows, skipping what others hold
-- `since` is where the batch before ended: between there and the oldest row lie its dead versions, which nobody may
-- clean away while a long transaction runs, and each batch would read those of all before it.
select cast(d.id as text) as id, d.finished_at
from durable.deliveries d
where d.state in ('sent', 'canceled', 'expired')
  and d.finished_at <= (select durable.durable_now() - make_interval(secs => :retention_seconds))
  and d.finished_at >= coalesce(cast(:since as timestamptz), '-infinity')
  and d.id <> all (cast(:without as uuid[]))
order by d.finished_at
limit :limit
for update skip locked

-- name: prune
-- before: locked by `old` in this transaction
-- after:  gone; `prune_journal` takes their history in the same transaction
-- locks:  the rows, held already
delete from durable.deliveries d where d.id = any (cast(:ids as uuid[]))

-- name: prune_journal
-- before: their rows are gone
delete from durable.journal j where j.row_id = any (cast(:ids as uuid[]))
