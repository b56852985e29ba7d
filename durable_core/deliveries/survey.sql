-- name: queues
-- The queues that something waits in: a hop over the index of each.
select q.queue from durable.waiting_queues() as q (queue)

-- name: waiting
-- Of each queue the rows longest due and the rows due next, a share of each; by kind.
with named as materialized (
    select q.queue from unnest(cast(:queues as text[])) as q (queue)
),
looked as materialized (
    select n.queue, p.kind, true as is_due, p.due_at, p.has_failed
    from named n,
        lateral (
            select d.kind, d.due_at, d.attempts - d.shutdowns - d.snoozes > 0 as has_failed
            from durable.deliveries d
            where d.state = 'pending' and d.queue = n.queue and d.due_at <= (select durable.durable_now())
            order by d.due_at
            limit :share
        ) as p
    union all
    select n.queue, p.kind, false, p.due_at, p.has_failed
    from named n,
        lateral (
            select d.kind, d.due_at, d.attempts - d.shutdowns - d.snoozes > 0 as has_failed
            from durable.deliveries d
            where d.state = 'pending' and d.queue = n.queue and d.due_at > (select durable.durable_now())
            order by d.due_at
            limit :share
        ) as p
)
select l.queue, l.kind, l.is_due, count(*) as rows, count(*) filter (where l.has_failed) as retrying,
    min(l.due_at) as oldest_due_at
from looked l
group by l.queue, l.kind, l.is_due

-- name: running
select d.queue, d.kind, count(*) as rows
from durable.deliveries d
where d.state = 'processing'
group by d.queue, d.kind

-- name: given_up
-- Of each state the newest failed and dead rows that a person did not discard.
select l.queue, l.kind, l.state, count(*) as rows, max(l.finished_at) as last
from (
    (
        select d.queue, d.kind, d.state, d.finished_at
        from durable.deliveries d
        where d.state = 'failed' and d.discarded_at is null
        order by d.finished_at desc
        limit :count_limit
    )
    union all
    (
        select d.queue, d.kind, d.state, d.finished_at
        from durable.deliveries d
        where d.state = 'dead' and d.discarded_at is null
        order by d.finished_at desc
        limit :count_limit
    )
) as l
group by l.queue, l.kind, l.state

-- name: done
-- The newest rows that are done with.
select l.queue, l.kind, l.state, count(*) as rows, max(l.finished_at) as last
from (
    select d.queue, d.kind, d.state, d.finished_at
    from durable.deliveries d
    where d.state in ('sent', 'canceled', 'expired')
    order by d.finished_at desc
    limit :count_limit
) as l
group by l.queue, l.kind, l.state
