-- name: due
-- How many plans wait for a worker in each queue, or in each of these; of at most so many looked at. The queue of those
-- alone that nobody may take now, for a pause or the clock, is there with none: `unhinted` puts them behind the others.
with paused as materialized (
    select s.what, s.name
    from durable.pauses s
    where s.ended_at is null and (s.until is null or s.until > (select durable.durable_now()))
)
select q.queue, w.waiting
from durable.plan_queues() as q (queue)
cross join lateral (
    select cast(count(*) filter (
        where l.until > (select durable.durable_now())
          and not exists (select from paused s where s.what = 'kind' and s.name = l.kind)) as integer) as waiting
    from (
        select p.kind, case p.state when 'approved' then p.expires_at else p.continue_until end as until
        from durable.plans p
        where (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
          and p.held_reason is null
          and p.queue = q.queue
        order by p.hint_at
        limit :limit
    ) as l
) as w
where (cast(:queues as text[]) is null or q.queue = any (cast(:queues as text[])))
  and not exists (select from paused s where s.what = 'queue' and s.name = q.queue)

-- name: unhinted
-- before: steps wait, and each queue has room for so many hints
-- after:  those whose hint was long ago, or whose queue is empty, the longest unhinted first and as many as there is
--         room for; and those among them that nobody may take now, as `idle`; for `mark` in the same transaction
-- locks:  these rows, skipping what others hold
-- Of a kind that a worker did not know an empty queue says nothing. Whose time is over is left to heal and expire.
with queue as materialized (
    select q.queue, q.room, q.empty, q.unsure,
        case when q.empty then cast('infinity' as timestamptz) else (select durable.durable_now()) end as until
    from jsonb_to_recordset(cast(:shares as jsonb)) as q (queue text, room integer, empty boolean, unsure boolean)
),
paused as materialized (
    select s.name
    from durable.pauses s
    where s.what = 'kind' and s.ended_at is null and (s.until is null or s.until > (select durable.durable_now()))
),
looked_at as materialized (
    select l.id, l.hint_at, l.idle, q.room,
        row_number() over (partition by q.queue, l.idle order by l.hint_at) as place
    from queue q
    cross join lateral (
        select w.id, w.hint_at,
            w.until <= (select durable.durable_now()) or exists (select from paused s where s.name = w.kind) as idle,
            w.hint_at <= (select durable.durable_now()) as its_time,
            w.waiting_for is null
                and w.hint_at - durable.hint_wait(w.hints) <= (select durable.durable_now() - interval '1 s') as lost,
            w.outlived
        from (
            (select p.id, p.kind, p.hint_at, p.hints, p.waiting_for,
                case p.state when 'approved' then p.expires_at else p.continue_until end as until,
                false as outlived
             from durable.plans p
             where (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
               and p.held_reason is null
               and p.queue = q.queue
               and p.hint_at <= q.until
             order by p.hint_at
             limit :window)
            union all
            -- Their wait was doubled while nobody could tell: where somebody can, it is ten minutes as of the others.
            select u.*, true
            from (
                select p.id, p.kind, p.hint_at, p.hints, p.waiting_for,
                    case p.state when 'approved' then p.expires_at else p.continue_until end as until
                from durable.plans p
                where not q.unsure and not q.empty
                  and (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
                  and p.held_reason is null
                  and p.hints > 6
                  and p.queue = q.queue
                order by p.hint_at
                limit :window
            ) as u
            where u.hint_at > q.until
              and u.hint_at - durable.hint_wait(u.hints) <= (select durable.durable_now() - interval '600 s')
        ) as w
    ) as l
    where l.its_time or (q.empty and l.lost and not l.idle) or (l.outlived and not l.idle)
)
select cast(p.id as text) as id, p.fence, p.kind, p.queue, p.priority, cast(p.receipts + 1 as integer) as step, l.idle
from looked_at l
cross join lateral (
    -- Row by row, by its limit: joined, the whole of the table might be read.
    select p.id, p.fence, p.kind, p.queue, p.priority, p.receipts
    from durable.plans p
    where p.id = l.id
      and (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
      -- Whoever hinted it meanwhile has put it off.
      and p.hint_at = l.hint_at
    limit 1
    for no key update skip locked
) as p
where l.idle or l.place <= l.room
order by l.hint_at

-- name: mark
-- before: locked by `unhinted` in this transaction
-- after:  hinted now, and to be hinted again in 10 s, twice as long for each hint that nobody took, 10 min at most; of an
--         `unsure` one without end. An idle one is looked at again a little later
-- locks:  the rows, held already
update durable.plans p
set hints = m.hints,
    hint_at = clock.now
        + case when m.idle then make_interval(secs => :idle_seconds) else durable.hint_wait(m.hints) end
from (
    select b.id, b.id = any (cast(:idle as uuid[])) as idle,
        cast(case
            when b.id = any (cast(:idle as uuid[])) then b.hints
            when b.id = any (cast(:unsure as uuid[])) then least(b.hints + 1, 24)
            else least(b.hints + 1, 6) end as smallint) as hints
    from durable.plans b
    where b.id = any (cast(:ids as uuid[]))
) as m,
(
    select durable.durable_now() as now,
        -- A mark that a failover takes back costs one more hint; it does not wait for a standby.
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated
) as clock
where p.id = m.id and p.id = any (cast(:ids as uuid[]))

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
