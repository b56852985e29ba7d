-- name: queues
-- When the row of each queue became due that is due longest and free to run: neither paused, nor held, nor behind
-- another of its ordering key. Of each queue the rows longest due are looked at, and where these all wait on purpose,
-- those due since some later instants, an equal share of the limit each: a pile of a paused kind hides no other kind
-- that is late, as long as this is one in so many.
with paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
),
named as materialized (
    select q.queue from durable.waiting_queues() as q (queue) limit :most_queues
),
since as materialized (
    select coalesce(
        (select durable.durable_now()) - make_interval(secs => a.seconds), cast('-infinity' as timestamptz)) as at
    from unnest(cast(:ages as float8[])) as a (seconds)
),
share as materialized (
    select greatest(1, :limit / greatest(1, (select count(*) from named) * (select count(*) from since))) as rows
)
select n.queue, cast(extract(epoch from min(f.due_at)) as float8) as due_at
from named n
cross join since s
cross join lateral (
    select r.due_at
    from (
        select d.id, d.kind, d.due_at, d.held_reason, d.ordering_key, d.created_at, d.attempts
        from durable.deliveries d
        where d.state = 'pending' and d.queue = n.queue and d.due_at >= s.at
          and d.due_at <= (select durable.durable_now())
        order by d.due_at
        limit (select h.rows from share h)
    ) as r
    where r.held_reason is null
      and not exists (select from paused p where p.what = 'kind' and p.name = r.kind)
      and (r.ordering_key is null
          or not durable.is_behind(r.id, r.ordering_key, r.created_at, r.attempts > 0, (select durable.durable_now())))
    order by r.due_at
    limit 1
) as f
where not exists (select from paused p where p.what = 'queue' and p.name = n.queue)
group by n.queue

-- name: waiting_queues
-- The queues that something waits in, by name.
select q.queue from durable.waiting_queues() as q (queue) limit :most_queues

-- name: waiting
-- The pending rows of these queues by kind: of each queue at most its share is read, the longest due first.
select n.queue, w.kind, 'pending' as state, count(*) as rows, count(w.held_reason) as held
from unnest(cast(:queues as text[])) as n (queue)
cross join lateral (
    select d.kind, d.held_reason
    from durable.deliveries d
    where d.state = 'pending' and d.queue = n.queue
    order by d.due_at
    limit :share
) as w
group by n.queue, w.kind

-- name: processing
-- The running rows, up to the limit.
select r.queue, r.kind, 'processing' as state, count(*) as rows, count(r.held_reason) as held
from (
    select d.queue, d.kind, d.held_reason
    from durable.deliveries d
    where d.state = 'processing'
    limit :limit
) as r
group by r.queue, r.kind

-- name: dead
-- Of each state the failed and dead rows that nobody discarded, up to the limit, the newest first.
select e.queue, e.kind, e.state, count(*) as rows, 0 as held
from (
    (
        select d.queue, d.kind, d.state
        from durable.deliveries d
        where d.state = 'failed' and d.discarded_at is null
        order by d.finished_at desc
        limit :limit
    )
    union all
    (
        select d.queue, d.kind, d.state
        from durable.deliveries d
        where d.state = 'dead' and d.discarded_at is null
        order by d.finished_at desc
        limit :limit
    )
) as e
group by e.queue, e.kind, e.state

-- name: estimates
-- How many rows each of these partial indexes held when it was last vacuumed or analysed; -1 before that.
select cast(pending.reltuples as float8) as pending, cast(running.reltuples as float8) as processing,
    cast(failed.reltuples as float8) as failed, cast(dead.reltuples as float8) as dead
from pg_catalog.pg_class pending, pg_catalog.pg_class running, pg_catalog.pg_class failed, pg_catalog.pg_class dead
where pending.oid = cast('durable.deliveries_due' as regclass)
  and running.oid = cast('durable.deliveries_processing' as regclass)
  and failed.oid = cast('durable.deliveries_still_failed' as regclass)
  and dead.oid = cast('durable.deliveries_still_dead' as regclass)

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

-- name: plans
-- Plans that are not done with, by state, queue and the kind of their next step: those that wait or were approved, the ones
-- that expire first, up to the limit, and of those that run the oldest, as many; how many of them a sweep holds; and when
-- the one that waits longest was proposed.
select w.state, w.queue, w.kind, count(*) as rows, count(w.held_reason) as held,
    cast(extract(epoch from min(w.created_at)) as float8) as oldest
from (
    (select p.state, p.queue, p.kind, p.held_reason, p.created_at
     from durable.plans p
     where p.state in ('pending', 'approved')
     order by p.expires_at
     limit :limit)
    union all
    (select p.state, p.queue, p.kind, p.held_reason, p.created_at
     from durable.plans p
     where p.state = 'executing'
     order by p.id
     limit :limit)
) as w
group by w.state, w.queue, w.kind

-- name: operations
-- Operations that are not done with, by state, queue and kind, up to the limit of each state: those to be issued soonest,
-- and the oldest of those that run; how many of them a sweep holds, and how many are past their patience, or past the
-- time to issue them.
select w.state, w.queue, w.kind, count(*) as rows, count(w.held_reason) as held,
    count(*) filter (where w.until <= (select durable.durable_now())) as overdue
from (
    (select o.state, o.queue, o.kind, o.held_reason, o.start_before as until
     from durable.operations o
     where o.state = 'queued'
     order by o.start_before
     limit :limit)
    union all
    (select o.state, o.queue, o.kind, o.held_reason, o.patience_until
     from durable.operations o
     where o.state = 'running'
     order by o.id
     limit :limit)
) as w
group by w.state, w.queue, w.kind
