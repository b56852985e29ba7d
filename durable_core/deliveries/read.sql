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

-- name: matching
-- All rows that a page's filters match, never run: the planner is asked how many it expects.
select d.id
from durable.deliveries d
where (cast(:state as text) is null or d.state = :state)
  and (cast(:kind as text) is null or d.kind = :kind)
  and (cast(:queue as text) is null or d.queue = :queue)
  and (cast(:key as text) is null or d.key = :key)

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
-- Whether a row is behind another reads its line besides, once for each line.
with named as (
    select q.queue from durable.waiting_queues() as q (queue)
    union
    select d.queue from durable.deliveries d where d.state = 'processing'
),
paused as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
)
select n.queue,
    (select min(d.due_at)
     from durable.deliveries d
     where d.state = 'pending' and d.queue = n.queue and d.due_at <= (select durable.durable_now())
    ) as oldest_due_at,
    due.rows as due,
    later.rows as later,
    (select count(*)
     from (
        select from durable.deliveries d where d.state = 'processing' and d.queue = n.queue
        limit :count_limit) as running
    ) as processing,
    due.paused,
    due.behind,
    due.no_handler as waiting_for_handler,
    due.no_fit as waiting_for_arguments,
    due.held,
    later.retrying
from named n,
    lateral (
        -- The limit first, the remarks after it: else a long backlog without remarks would be read to its end.
        select count(*) as rows,
            count(*) filter (where p.waiting_for = 'handler') as no_handler,
            count(*) filter (where p.waiting_for = 'arguments') as no_fit,
            count(p.held_reason) as held,
            count(*) filter (
                where exists (select from paused s where s.name = case s.what when 'queue' then n.queue else p.kind end)
            ) as paused,
            count(*) filter (
                -- Of the due rows of one line all but one are behind that one; of it alone the line is to be read.
                where p.ordering_key is not null
                  and case when p.place > 1 then true
                      else durable.is_behind(p.id, p.ordering_key, p.created_at, p.has_begun, (select durable.durable_now()))
                  end
            ) as behind
        from (
            select o.*,
                row_number() over (
                    partition by o.ordering_key order by o.has_begun desc, o.created_at, o.id) as place
            from (
                select d.id, d.kind, d.waiting_for, d.held_reason, d.ordering_key, d.created_at,
                    d.attempts > 0 as has_begun
                from durable.deliveries d
                where d.state = 'pending' and d.queue = n.queue and d.due_at <= (select durable.durable_now())
                order by d.due_at
                limit :count_limit) as o
        ) as p
    ) as due,
    lateral (
        -- Those due next first: a back-off is shorter than most plans.
        select count(*) as rows, count(*) filter (where l.has_failed) as retrying
        from (
            select d.attempts - d.shutdowns - d.snoozes > 0 as has_failed
            from durable.deliveries d
            where d.state = 'pending' and d.queue = n.queue and d.due_at > (select durable.durable_now())
            order by d.due_at
            limit :count_limit) as l
    ) as later
order by oldest_due_at nulls last, n.queue

-- name: ended
-- What a person must look at, counted up to a limit.
select
    (select count(*) from (
        select from durable.deliveries d
        where d.state = 'dead' and d.discarded_at is null limit :count_limit
    ) as dead) as dead,
    (select count(*) from (
        select from durable.deliveries d
        where d.state = 'failed' and d.discarded_at is null limit :count_limit
    ) as failed) as failed

-- name: expiries
-- The waiting rows that expire soon, counted up to a limit; and, of the rows that were done with lately, the newest up
-- to the limit and no more: how many of these expired, and of how long a time that tells.
with done as materialized (
    select d.state, d.finished_at
    from durable.deliveries d
    where d.state in ('sent', 'canceled', 'expired')
      and d.finished_at > (select durable.durable_now() - make_interval(secs => :lately_seconds))
    order by d.finished_at desc
    limit :count_limit
)
select
    (select count(*) from (
        select from durable.deliveries d
        where d.state = 'pending' and d.held_reason is null
          and d.expires_at <= (select durable.durable_now() + make_interval(secs => :soon_seconds))
        limit :count_limit
    ) as soon) as expiring,
    (select count(*) from done n where n.state = 'expired') as expired,
    case when (select count(*) from done) < :count_limit
        then :lately_seconds
        else cast(extract(epoch from durable.durable_now() - (select min(n.finished_at) from done n)) as float8)
    end as expired_within_seconds

-- name: now
select durable.durable_now() as now
