-- A row that is locked is left to its holder. These end a holder that is past all its time.

-- name: stuck
-- Rows long past their deadline, each with the sessions that say they hold it. `alone`: the row's lock is this
-- session's and nobody shares it.
select cast(d.id as text) as id, d.kind, d.fence, cast(cast(d.xmax as text) as bigint) as locker,
    a.pid, a.wait_event = 'SyncRep' as commits,
    exists (
        select from pg_locks l
        where l.pid = a.pid and l.locktype = 'transactionid' and l.granted and l.transactionid = d.xmax
    ) as alone
from (
    select d.id, d.kind, d.fence, d.xmax, d.deadline_at
    from durable.deliveries d
    where d.state = 'processing' and d.held_reason is null
    union all
    -- Between two steps nobody owns a plan, and it has no deadline.
    select p.id, p.kind, p.fence, p.xmax, p.deadline_at
    from durable.plans p
    where p.state = 'executing' and p.owner > '' and p.held_reason is null
) as d
join pg_stat_activity a on a.datname = current_database()
    and a.application_name = concat('durable ', d.id, ' ', d.fence)
where d.deadline_at <= (select durable.durable_now() - make_interval(secs => :grace_seconds))

-- name: shares
-- Whether this session is one of several that hold the row's lock. An error where the number names no such group.
select exists (
    select from pg_get_multixact_members(cast(cast(:locker as text) as xid)) m
    join pg_locks l on l.locktype = 'transactionid' and l.granted and l.transactionid = m.xid
    where l.pid = :pid
) as shares

-- name: cut_off
-- before: this session holds the lock of this row under this fence, by its own name
-- after:  it is ended, its transaction with it, and one journal line says so; the row is there for reap
-- locks:  nothing
with ended as materialized (
    select a.pid, pg_terminate_backend(a.pid) as done
    from pg_stat_activity a
    where a.pid = :pid
      and a.application_name = concat('durable ', cast(:id as uuid), ' ', cast(:fence as bigint))
)
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, facts)
select r.id, r.contract, 'cut off', r.state, r.state, r.fence, r.attempt, r.owner, 'LOCKED_PAST_DEADLINE',
    jsonb_build_object('backend', e.pid, 'deadline_at', r.deadline_at)
from ended e, (
    select d.id, 'delivery' as contract, d.state, d.fence, d.attempts as attempt, d.deadline_at,
        d.owner_host || ':' || d.owner_pid as owner
    from durable.deliveries d
    where d.id = cast(:id as uuid) and d.fence = :fence
    union all
    select p.id, 'plan', p.state, p.fence, p.receipts + 1, p.deadline_at, p.owner_host || ':' || p.owner_pid
    from durable.plans p
    where p.id = cast(:id as uuid) and p.fence = :fence
) as r
where e.done
returning 1
