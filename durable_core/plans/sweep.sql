-- name: due
-- How many plans wait for a worker in each queue. Of more than so many the rest is not counted.
select w.queue, cast(count(*) as integer) as waiting
from (
    select p.queue
    from durable.plans p
    where p.state = 'approved' or (p.state = 'executing' and p.owner is null)
    limit :limit
) as w
group by w.queue

-- name: unhinted
-- before: a step waits, and its hint was long ago, or its queue is empty
-- after:  locked, for `mark` in the same transaction
-- locks:  the rows, skipping what others hold
-- A plan whose time is over is left to heal and expire. Of a kind that a worker did not know an empty queue says nothing.
with paused as materialized (
    select s.what, s.name
    from durable.pauses s
    where s.ended_at is null and (s.until is null or s.until > (select durable.durable_now()))
)
select cast(p.id as text) as id, p.fence, p.kind, p.queue, p.priority, cast(p.receipts + 1 as integer) as step
from durable.plans p
where (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
  and p.held_reason is null
  and case p.state when 'approved' then p.expires_at else p.continue_until end > (select durable.durable_now())
  and not exists (select from paused s where s.name = case s.what when 'queue' then p.queue else p.kind end)
  and (p.hint_at <= (select durable.durable_now())
      or (p.queue = any (cast(:empty as text[])) and p.waiting_for is null
          and p.hint_at - make_interval(secs => least(10 * power(2, least(p.hints, 6)), 600))
              <= (select durable.durable_now() - interval '1 s')))
order by p.hint_at
limit :limit
for no key update skip locked

-- name: mark
-- before: locked by `unhinted` in this transaction
-- after:  hinted now, and to be hinted again in 10 s, twice as long for each hint that nobody took, 10 min at most
-- locks:  the rows, held already
update durable.plans p
set hints = least(p.hints + 1, 6),
    hint_at = clock.now + make_interval(secs => least(10 * power(2, least(p.hints + 1, 6)), 600))
from (
    select durable.durable_now() as now,
        -- A mark that a failover takes back costs one more hint; it does not wait for a standby.
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated
) as clock
where p.id = any (cast(:ids as uuid[]))

-- name: holding_pids
-- The processes of this owner that are inside a step.
select distinct p.owner_pid as pid from durable.plans p where p.state = 'executing' and p.owner = :owner

-- name: owned
-- before: executing under this owner, in a process of it that has died
-- after:  locked, for `heal` or `give_back` in the same transaction, without waiting for the lease
-- locks:  the rows, skipping those that are locked: the dead process's backend may not have noticed yet
select cast(p.id as text) as id, p.fence
from durable.plans p
where p.state = 'executing' and p.held_reason is null and p.owner = :owner
  and p.owner_pid = any (cast(:pids as integer[]))
order by p.id
for no key update skip locked

-- name: give_back
-- before: locked by `owned` in this transaction: its step had not committed, and its transaction has ended
-- after:  executing and nobody's, to be hinted soon; a report under the old fence finds no owner and is refused
-- locks:  the rows, held already
with given as (
    update durable.plans p
    set hint_at = clock.now,
        hints = 0,
        -- A deploy costs nothing, not the rest of the window either: another worker has a lease's time to take it.
        continue_until = greatest(p.continue_until, clock.now + interval '120 s'),
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from (select durable.durable_now() as now) as clock, durable.plans b
    where b.id = p.id and p.id = any (cast(:ids as uuid[])) and p.state = 'executing' and p.owner is not null
    returning p.id, p.fence, p.receipts, p.owner_host, p.owner_pid, b.lease_expires_at as lease_before
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, lease_before)
    select g.id, 'plan', 'release', 'executing', 'executing', g.fence, g.receipts + 1,
        g.owner_host || ':' || g.owner_pid, 'SHUTDOWN', g.lease_before
    from given g
)
select cast(g.id as text) as id from given g

-- name: old
-- before: ended longer ago than the retention
-- after:  locked, for `prune` in the same transaction
-- locks:  the rows, skipping what others hold
select cast(p.id as text) as id, p.finished_at
from durable.plans p
where p.state in ('executed', 'failed', 'rejected', 'expired')
  and p.finished_at <= (select durable.durable_now() - make_interval(secs => :retention_seconds))
  and p.finished_at >= coalesce(cast(:since as timestamptz), '-infinity')
  and p.id <> all (cast(:without as uuid[]))
order by p.finished_at
limit :limit
for update skip locked

-- name: prune
-- before: locked by `old` in this transaction
-- after:  gone, and their receipts; `prune_journal` takes their history in the same transaction
-- locks:  the rows, held already
delete from durable.plans p where p.id = any (cast(:ids as uuid[]))

-- name: prune_journal
-- before: their rows are gone
delete from durable.journal j where j.row_id = any (cast(:ids as uuid[]))
