-- name: due
-- How many queued operations wait in each queue, or in each of these, to be issued; of at most so many looked at, the
-- longest unhinted first. The queue of those alone that nobody may issue now, for a pause or the clock, is there with
-- none: `unhinted` puts them behind the others, and so out of what is looked at here.
with paused as materialized (
    select s.what, s.name
    from durable.pauses s
    where s.ended_at is null and (s.until is null or s.until > (select durable.durable_now()))
)
select q.queue, w.rows
from durable.operation_queues() as q (queue)
cross join lateral (
    select count(*) as seen,
        cast(count(*) filter (where
            l.start_before > (select durable.durable_now())
            and not exists (
                select from paused s where s.name = case s.what when 'queue' then q.queue else l.kind end)
        ) as integer) as rows
    from (
        select o.kind, o.due_at, o.start_before
        from durable.operations o
        where o.state = 'queued' and o.held_reason is null and o.queue = q.queue
        order by o.hint_at
        limit :limit
    ) as l
    where l.due_at <= (select durable.durable_now())
) as w
where (cast(:queues as text[]) is null or q.queue = any (cast(:queues as text[]))) and w.seen > 0

-- name: polls_due
-- How many polls are due in each queue, or in each of these; of at most so many looked at. No pause stops a poll. Running
-- ones are asked for as what waits and is not queued, which is the condition of their index.
select q.queue, w.rows
from durable.operation_queues() as q (queue)
cross join lateral (
    select cast(count(*) as integer) as rows
    from (
        select o.due_at
        from durable.operations o
        where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.state <> 'queued'
          and o.held_reason is null
          and o.queue = q.queue
          and o.due_at <= (select durable.durable_now())
        order by o.due_at
        limit :limit
    ) as l
) as w
where (cast(:queues as text[]) is null or q.queue = any (cast(:queues as text[]))) and w.rows > 0

-- name: unhinted
-- before: due rows, and each queue has room for so many hints
-- after:  those in this state whose hint was long ago, or whose queue is empty, the longest unhinted first and as many as
--         there is room for; and those of which nobody may issue the call now, as `idle`; for `mark` in the same transaction
-- locks:  these rows, skipping what others hold
-- Of a kind that a worker did not know an empty queue says nothing: that worker has emptied it.
with queue as materialized (
    select q.queue, q.room, q.empty, q.unsure,
        case when q.empty then cast('infinity' as timestamptz) else (select durable.durable_now()) end as until
    from jsonb_to_recordset(cast(:shares as jsonb)) as q (queue text, room integer, empty boolean, unsure boolean)
),
paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
),
looked_at as materialized (
    select l.id, l.hint_at, q.room, l.idle,
        row_number() over (partition by q.queue, l.idle order by l.hint_at) as place
    from queue q
    cross join lateral (
        select w.id, w.hint_at,
            w.hint_at <= (select durable.durable_now()) as its_time,
            w.state = 'queued' and (
                w.start_before <= (select durable.durable_now())
                or exists (select from paused p where p.name = case p.what when 'queue' then q.queue else w.kind end)
            ) as idle,
            -- One that a worker is looking at has taken its hint out of the queue.
            w.waiting_for is null
                and (w.hints = 0
                    or w.hint_at - durable.hint_wait(w.hints - 1) <= (select durable.durable_now() - interval '1 s'))
                and (w.state = 'running' or coalesce(w.beat_at
                    <= (select durable.durable_now() - make_interval(secs => :precheck_seconds)), true)) as lost,
            w.outlived
        from (
            -- Each state has a window and an index of its own: the queued ones take no place from the polls.
            (select o.id, o.kind, o.state, o.hint_at, o.hints, o.waiting_for, o.beat_at, o.start_before, o.due_at,
                false as outlived
             from durable.operations o
             where cast(:state as text) = 'queued'
               and o.state = 'queued'
               and o.held_reason is null
               and o.queue = q.queue
               and o.hint_at <= q.until
             order by o.hint_at
             limit :window)
            union all
            (select o.id, o.kind, o.state, o.hint_at, o.hints, o.waiting_for, o.beat_at, o.start_before, o.due_at,
                false as outlived
             from durable.operations o
             where cast(:state as text) = 'running'
               and (o.state = 'queued' or (o.state = 'running' and o.owner is null))
               and o.state <> 'queued'
               and o.held_reason is null
               and o.queue = q.queue
               and o.hint_at <= (select durable.durable_now())
             order by o.hint_at
             limit :window)
            union all
            select d.*, false
            from (
                select o.id, o.kind, o.state, o.hint_at, o.hints, o.waiting_for, o.beat_at, o.start_before, o.due_at
                from durable.operations o
                where cast(:state as text) = 'running'
                  and q.empty
                  and (o.state = 'queued' or (o.state = 'running' and o.owner is null))
                  and o.state <> 'queued'
                  and o.held_reason is null
                  and o.queue = q.queue
                  and o.due_at <= (select durable.durable_now())
                order by o.due_at
                limit :window
            ) as d
            where d.hint_at > (select durable.durable_now())
            union all
            -- Their wait was doubled while nobody could tell: where somebody can, it is ten minutes as of the others.
            select u.*, true
            from (
                (select o.id, o.kind, o.state, o.hint_at, o.hints, o.waiting_for, o.beat_at, o.start_before, o.due_at
                 from durable.operations o
                 where cast(:state as text) = 'queued'
                   and not q.unsure and not q.empty
                   and o.state = 'queued'
                   and o.held_reason is null
                   and o.hints > 7
                   and o.queue = q.queue
                 order by o.hint_at
                 limit :window)
                union all
                (select o.id, o.kind, o.state, o.hint_at, o.hints, o.waiting_for, o.beat_at, o.start_before, o.due_at
                 from durable.operations o
                 where cast(:state as text) = 'running'
                   and not q.unsure and not q.empty
                   and (o.state = 'queued' or (o.state = 'running' and o.owner is null))
                   and o.state <> 'queued'
                   and o.held_reason is null
                   and o.hints > 7
                   and o.queue = q.queue
                 order by o.hint_at
                 limit :window)
            ) as u
            where u.hint_at > (select durable.durable_now())
              and u.hint_at - durable.hint_wait(u.hints - 1) <= (select durable.durable_now() - interval '600 s')
        ) as w
        where w.due_at <= (select durable.durable_now())
    ) as l
    where l.its_time or (q.empty and l.lost and not l.idle) or (l.outlived and not l.idle)
)
select cast(p.id as text) as id, p.fence, p.state, p.kind, p.queue, p.priority, l.idle
from looked_at l
cross join lateral (
    -- Row by row, by its limit: joined, the whole of the table might be read.
    select o.id, o.fence, o.state, o.kind, o.queue, o.priority
    from durable.operations o
    where o.id = l.id
      and o.state = :state
      and o.owner is null
      and o.due_at <= (select durable.durable_now())
      -- Whoever hinted it meanwhile has put it off.
      and o.hint_at = l.hint_at
    limit 1
    for no key update skip locked
) as p
where l.idle or l.place <= l.room
order by l.hint_at

-- name: mark
-- before: locked by `unhinted` in this transaction
-- after:  hinted now, and to be hinted again after a while that doubles each time, up to ten minutes; of an `unsure` one
--         without end. An idle one is looked at again a little later. It decides nothing
-- locks:  the rows, held already
update durable.operations o
set hints = m.hints,
    hint_at = clock.now
        + case when m.idle then make_interval(secs => :idle_seconds) else durable.hint_wait(m.hints - 1) end
from (
    select b.id, b.id = any (cast(:idle as uuid[])) as idle,
        cast(case
            when b.id = any (cast(:idle as uuid[])) then b.hints
            when b.id = any (cast(:unsure as uuid[])) then least(b.hints + 1, 25)
            else least(b.hints + 1, 7) end as smallint) as hints
    from durable.operations b
    where b.id = any (cast(:ids as uuid[]))
) as m,
(
    select durable.durable_now() as now,
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated
) as clock
where o.id = m.id and o.id = any (cast(:ids as uuid[]))

-- name: to_ask
-- before: canceled lately with its ids known, the other side not asked yet to stop, and no hint of it for a while
-- after:  a line for each says that it is hinted for that: of a row that ended nothing else can be marked
-- locks:  nothing; two sweeps at once hint it twice
with canceled as materialized (
    select o.id, o.kind, o.queue, o.priority, o.state, o.fence
    from durable.operations o
    where o.state = 'canceled'
      and o.cancels
      and o.external_ids is not null
      and o.finished_at > (select durable.durable_now() - make_interval(secs => :ask_seconds))
      and not exists (
          select from durable.journal j
          where j.row_id = o.id
            and (j.move = 'ask to cancel' or (j.move = 'hint to cancel'
                and j.at > (select durable.durable_now() - make_interval(secs => :again_seconds)))))
    order by o.finished_at desc
    limit :limit
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence)
    select c.id, 'operation', 'hint to cancel', c.state, c.state, c.fence from canceled c
)
select cast(c.id as text) as id, c.kind, c.queue, c.priority from canceled c

-- name: lapsed
-- before: running, and the lease of its owner is over, or nobody has it and its patience is over
-- after:  locked, for `take_back` in the same transaction to decide; the longest over first, so many of each
-- locks:  the rows, skipping those that are locked: while a row is locked its holder is alive
with lapsed as materialized (
    select o.id, o.fence, o.kind, o.lease_expires_at as until
    from durable.operations o
    where o.state = 'running'
      and o.owner > ''
      and o.held_reason is null
      and o.lease_expires_at <= (select durable.durable_now())
    order by o.lease_expires_at
    limit :limit
    for no key update skip locked
),
silent as materialized (
    select o.id, o.fence, o.kind, o.patience_until as until
    from durable.operations o
    where o.state = 'running'
      and o.owner is null
      and o.held_reason is null
      and o.patience_until <= (select durable.durable_now())
    order by o.patience_until
    limit :limit
    for no key update skip locked
)
select cast(l.id as text) as id, l.fence, l.kind
from (select * from lapsed union all select * from silent) as l
where l.until <= durable.durable_now()

-- name: holding_pids
-- The processes of this owner that hold an operation.
select distinct o.owner_pid as pid from durable.operations o where o.state = 'running' and o.owner = :owner

-- name: owned
-- before: running under this owner, in a process of it that has died
-- after:  locked, for `take_back` in the same transaction, without waiting for the lease
-- locks:  the rows, skipping those that are locked: the dead process's backend may not have noticed yet
select cast(o.id as text) as id, o.fence, o.kind
from durable.operations o
where o.state = 'running' and o.held_reason is null and o.owner = :owner
  and o.owner_pid = any (cast(:pids as integer[]))
order by o.id
for no key update skip locked

-- name: take_back
-- before: locked by `lapsed` or `owned` in this transaction
-- after:  its call was under way (fence 1 and no ids): failed, outcome unknown, or to be looked for where the kind can;
--         its poll was under way: due again, that claim alone released; nobody had it: failed, or its patience renewed
--         once where our own polls were not made. The fence stays, so that a late report on a row that nobody took
--         meanwhile still lands. Nothing here issues a call
-- locks:  the rows, held already
with clock as materialized (
    select durable.durable_now() as now
),
verdict as materialized (
    select o.id, clock.now, o.lease_expires_at as lease_before, o.owner_host || ':' || o.owner_pid as owner,
        case
            when o.owner is not null and o.external_ids is null and o.fence = 1
                then case when o.finds then 'looked for' else 'unknown' end
            when o.owner is not null then 'released'
            when o.outage_at is null
                and o.due_at <= clock.now - make_interval(secs => least(:outage_seconds, o.patience_seconds / 2))
                then 'renewed'
            when o.external_ids is null then 'unknown'
            else 'silent'
        end as came_to
    from durable.operations o, clock
    where o.id = any (cast(:ids as uuid[])) and o.state = 'running'
),
moved as (
    update durable.operations o
    set state = case when v.came_to in ('unknown', 'silent') then 'failed' else 'running' end,
        finished_at = case when v.came_to in ('unknown', 'silent') then v.now end,
        -- A claim that lapsed long ago leaves a poll that was due since: so a gap of our own shows.
        due_at = case v.came_to when 'looked for' then v.now
            when 'released' then least(v.now, v.lease_before) else o.due_at end,
        hint_at = v.now,
        hints = 0,
        patience_until = case when v.came_to in ('looked for', 'renewed')
            then v.now + make_interval(secs => o.patience_seconds) else o.patience_until end,
        outage_at = case when v.came_to = 'renewed' then v.now else o.outage_at end,
        error_code = case v.came_to when 'unknown' then 'OUTCOME_UNKNOWN' when 'silent' then 'PATIENCE_OVER' end,
        error_message = case v.came_to
            when 'unknown' then 'the worker was lost around the call, and nobody can tell what became of it'
            when 'silent' then 'the other side was silent for too long' end,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from verdict v
    where o.id = v.id and o.state = 'running'
    returning o.id, o.kind, o.state, o.fence, o.error_code, v.came_to, v.owner, v.lease_before
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, owner, reason, lease_before)
    select m.id, 'operation', case m.came_to when 'renewed' then 'outage' else cast(:move as text) end,
        'running', m.state, m.fence, m.owner,
        case m.came_to when 'renewed' then 'OUTAGE' else coalesce(m.error_code, cast(:code as text)) end, m.lease_before
    from moved m
)
select cast(m.id as text) as id, m.kind, m.state, m.error_code, m.came_to from moved m

-- name: hold
-- before: in this state under this fence, and a sweep failed on it
-- after:  it stays where it is, says why, and no sweep touches it until its owner reports or an operator releases it
-- locks:  the row
with held as (
    update durable.operations o
    set held_reason = :reason
    where o.id = cast(:id as uuid) and o.fence = :fence and o.state in ('queued', 'running') and o.held_reason is null
    returning o.id, o.state, o.fence
)
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)
select h.id, 'operation', 'hold', h.state, h.state, h.fence, cast(:reason as text)
from held h

-- name: overdue
-- before: queued, and nobody issued it in time
-- after:  locked, for `expire` in the same transaction; the longest over first
-- locks:  the rows, skipping what others hold
select cast(o.id as text) as id, o.fence, o.kind
from durable.operations o
where o.state = 'queued'
  and o.held_reason is null
  and o.start_before <= (select durable.durable_now())
order by o.start_before
limit :limit
for no key update skip locked

-- name: expire
-- before: locked by `overdue` in this transaction
-- after:  failed, never issued, its slot free
-- locks:  the rows, held already
with expired as (
    update durable.operations o
    set state = 'failed',
        finished_at = clock.now,
        waiting_for = null,
        error_code = 'NOT_STARTED',
        error_message = 'no worker issued it in time'
    from (select durable.durable_now() as now) as clock
    where o.id = any (cast(:ids as uuid[])) and o.state = 'queued' and o.start_before <= clock.now
    returning o.id, o.fence
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason)
    select e.id, 'operation', 'expire', 'queued', 'failed', e.fence, 'NOT_STARTED' from expired e
)
select cast(e.id as text) as id from expired e

-- name: old
-- before: ended longer ago than the retention
-- after:  locked, for `prune` in the same transaction
-- locks:  the rows, skipping what others hold
select cast(o.id as text) as id, o.finished_at
from durable.operations o
where o.state in ('succeeded', 'failed', 'canceled')
  and o.finished_at <= (select durable.durable_now() - make_interval(secs => :retention_seconds))
  and o.finished_at >= coalesce(cast(:since as timestamptz), '-infinity')
  and o.id <> all (cast(:without as uuid[]))
order by o.finished_at
limit :limit
for update skip locked

-- name: prune
-- before: locked by `old` in this transaction
-- after:  gone; `prune_journal` takes their history in the same transaction
-- locks:  the rows, held already
delete from durable.operations o where o.id = any (cast(:ids as uuid[]))

-- name: prune_journal
-- before: their rows are gone
delete from durable.journal j where j.row_id = any (cast(:ids as uuid[]))
