-- name: get
select cast(d.id as text) as id, d.kind, d.queue, d.priority, d.key, d.ordering_key, cast(d.arguments as text) as arguments, d.state,
    d.due_at, d.expires_at, d.fence, d.settled_fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes,
    d.max_attempts, d.max_interruptions, d.owner, d.owner_pid, d.owner_host, d.claimed_at, d.beat_at,
    d.lease_expires_at, d.deadline_at, d.waiting_for, d.held_reason, d.error_code, d.error_message,
    cast(d.result as text) as result, d.created_at, d.finished_at, d.discarded_at
from durable.deliveries d
where d.id = cast(:id as uuid)

-- name: page
-- Newest first, by key; `after` is the id of the last row of the page before.
select cast(d.id as text) as id, d.kind, d.queue, d.priority, d.key, d.ordering_key, cast(d.arguments as text) as arguments, d.state,
    d.due_at, d.expires_at, d.fence, d.settled_fence, d.attempts, d.interruptions, d.shutdowns, d.snoozes,
    d.max_attempts, d.max_interruptions, d.owner, d.owner_pid, d.owner_host, d.claimed_at, d.beat_at,
    d.lease_expires_at, d.deadline_at, d.waiting_for, d.held_reason, d.error_code, d.error_message,
    cast(d.result as text) as result, d.created_at, d.finished_at, d.discarded_at
from durable.deliveries d
where (cast(:ids as uuid[]) is null or d.id = any (cast(:ids as uuid[])))
  and (cast(:after as uuid) is null or d.id < cast(:after as uuid))
  and (cast(:state as text) is null or d.state = :state)
  and (cast(:kind as text) is null or d.kind = :kind)
  and (cast(:queue as text) is null or d.queue = :queue)
  and (cast(:key as text) is null or d.key = :key)
order by d.id desc
limit :limit

-- name: few
-- The ids of a page in a state of few rows, by the index of that state: while the table is not yet analysed, the
-- planner takes such rows for many, and would walk all others by their key to find them.
with found as materialized (
    select d.id
    from durable.deliveries d
    where d.state = :state
      and (cast(:after as uuid) is null or d.id < cast(:after as uuid))
      and (cast(:kind as text) is null or d.kind = :kind)
      and (cast(:queue as text) is null or d.queue = :queue)
      and (cast(:key as text) is null or d.key = :key)
)
select cast(f.id as text) as id from found f order by f.id desc limit :limit

-- name: queues
-- One line a queue that has waiting or running work: the age of its oldest due row first.
-- Every count reads at most the limit of its queue's rows in that state; the names of running queues read all that run.
with recursive hop (queue) as (
    (select d.queue
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
        limit 1)
    from hop h
    where h.queue is not null
),
named as (
    select h.queue from hop h where h.queue is not null
    union
    select d.queue from durable.deliveries d where d.state = 'processing'
)
select n.queue,
    (select min(d.due_at)
     from durable.deliveries d
     where d.state = 'pending' and d.queue = n.queue and d.due_at <= (select durable.durable_now())
    ) as oldest_due_at,
    due.rows as due,
    (select count(*)
     from (
        select from durable.deliveries d
        where d.state = 'pending' and d.queue = n.queue and d.due_at > (select durable.durable_now())
        limit :count_limit) as later
    ) as later,
    (select count(*)
     from (
        select from durable.deliveries d where d.state = 'processing' and d.queue = n.queue
        limit :count_limit) as running
    ) as processing,
    due.waiting as waiting_for_handler
from named n,
    lateral (
        -- The limit first, the remark after it: else a long backlog without remarks would be read to its end.
        select count(*) as rows, count(o.waiting_for) as waiting
        from (
            select d.waiting_for
            from durable.deliveries d
            where d.state = 'pending' and d.queue = n.queue and d.due_at <= (select durable.durable_now())
            order by d.due_at
            limit :count_limit) as o
    ) as due
order by oldest_due_at nulls last, n.queue

-- name: ended
-- What a person must look at, counted up to a limit.
select
    (select count(*) from (
        select from durable.deliveries d
        where d.state in ('dead', 'failed') and d.state = 'dead' and d.discarded_at is null limit :count_limit
    ) as dead) as dead,
    (select count(*) from (
        select from durable.deliveries d
        where d.state in ('dead', 'failed') and d.state = 'failed' and d.discarded_at is null limit :count_limit
    ) as failed) as failed

-- name: now
select durable.durable_now() as now
