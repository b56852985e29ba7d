-- name: bound
-- before: a transaction that has read nothing yet
-- after:  it cannot write, no statement of it runs longer than this, and each reads its rows in the order of an index
--         up to its limit; all of it ends with the transaction
-- A planner that knows nothing of the table yet would else read and sort every row, to take the first.
select set_config('transaction_read_only', 'on', true) as read_only,
    set_config('statement_timeout', cast(:milliseconds as text), true) as statement_timeout,
    set_config('enable_seqscan', 'off', true) as by_an_index,
    set_config('enable_bitmapscan', 'off', true) as in_its_order,
    set_config('enable_sort', 'off', true) as unsorted

-- name: queues
-- When the longest due row of each queue became due: one look at the index for each.
with recursive hop (queue, place) as (
    (select d.queue, 1
     from durable.deliveries d
     where d.state = 'pending'
     order by d.queue
     limit 1)
    union all
    select (
        select d.queue
        from durable.deliveries d
        where d.state = 'pending' and d.queue > h.queue
        order by d.queue
        limit 1), h.place + 1
    from hop h
    where h.queue is not null and h.place < :most_queues
)
select h.queue, cast(extract(epoch from o.due_at) as float8) as due_at
from hop h
cross join lateral (
    select d.due_at
    from durable.deliveries d
    where d.state = 'pending' and d.queue = h.queue and d.due_at <= (select durable.durable_now())
    order by d.due_at
    limit 1
) as o

-- name: waiting
-- The pending rows by queue and kind: of each queue at most the limit is read, the longest due first.
with recursive hop (queue, place) as (
    (select d.queue, 1
     from durable.deliveries d
     where d.state = 'pending'
     order by d.queue
     limit 1)
    union all
    select (
        select d.queue
        from durable.deliveries d
        where d.state = 'pending' and d.queue > h.queue
        order by d.queue
        limit 1), h.place + 1
    from hop h
    where h.queue is not null and h.place < :most_queues
)
select h.queue, w.kind, 'pending' as state, count(*) as rows, 0 as discarded
from hop h
cross join lateral (
    select d.kind
    from durable.deliveries d
    where d.state = 'pending' and d.queue = h.queue
    order by d.due_at
    limit :limit
) as w
group by h.queue, w.kind

-- name: processing
-- The running rows, up to the limit.
select r.queue, r.kind, 'processing' as state, count(*) as rows, 0 as discarded
from (
    select d.queue, d.kind
    from durable.deliveries d
    where d.state = 'processing'
    limit :limit
) as r
group by r.queue, r.kind

-- name: dead
-- Failed and dead rows up to the limit, the newest first; those that a person gave up on are read and told apart.
select e.queue, e.kind, e.state, count(*) as rows, count(e.discarded_at) as discarded
from (
    select d.queue, d.kind, d.state, d.discarded_at
    from durable.deliveries d
    where d.state in ('dead', 'failed')
    order by d.finished_at desc
    limit :limit
) as e
group by e.queue, e.kind, e.state

-- name: estimates
-- How many rows each of these partial indexes held when it was last vacuumed or analysed; -1 before that.
select cast(pending.reltuples as float8) as pending, cast(running.reltuples as float8) as processing,
    cast(ended.reltuples as float8) as dead
from pg_catalog.pg_class pending, pg_catalog.pg_class running, pg_catalog.pg_class ended
where pending.oid = cast('durable.deliveries_due' as regclass)
  and running.oid = cast('durable.deliveries_processing' as regclass)
  and ended.oid = cast('durable.deliveries_dead' as regclass)

-- name: pauses
-- What is paused: queues, kinds and schedules; as many rows as an operator paused.
(
    select p.what as scope, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
    limit :limit
)
union all
(
    select 'schedule', s.kind
    from durable.schedules s
    where s.paused_at is not null and (s.paused_until is null or s.paused_until > (select durable.durable_now()))
    limit :limit
)

-- name: schedules
-- When each schedule that is not paused is due next: as many rows as there are periodic kinds.
select s.kind, cast(extract(epoch from s.next_slot) as float8) as next_slot
from durable.schedules s
where s.paused_at is null or s.paused_until <= (select durable.durable_now())
limit :limit

-- name: loops
-- A line for each sweep: when it last ended, how long it took, whether it failed.
select l.name, cast(extract(epoch from l.ended_at) as float8) as ended_at, l.error is not null as failed,
    cast(extract(epoch from l.ended_at - l.began_at) as float8) as seconds
from durable.loops l
