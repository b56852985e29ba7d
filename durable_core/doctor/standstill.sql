-- name: plans
-- The plans that have not ended, by kind, queue and what keeps them; one of each for a person to look at. Of those that
-- wait, or were approved, the ones that expire first are looked at, of those that run the oldest, up to a limit each. Of
-- what a sweep met only the kind of error: the rest may quote a row.
select l.kind, l.queue, l.waiting_for, split_part(l.held_reason, ':', 1) as held, false as is_late,
    l.until <= clock.since as is_overdue, l.claimed and l.until <= clock.since as is_past_claim,
    count(*) as rows, min(cast(l.id as text)) as id
from (select durable.durable_now() - make_interval(secs => :patience_seconds) as since) as clock, (
    (select p.id, p.kind, p.queue, p.waiting_for, p.held_reason, p.expires_at as until, false as claimed
     from durable.plans p
     where p.state in ('pending', 'approved')
     order by p.expires_at
     limit :most)
    union all
    (select p.id, p.kind, p.queue, p.waiting_for, p.held_reason, coalesce(p.deadline_at, p.continue_until),
        p.deadline_at is not null
     from durable.plans p
     where p.state = 'executing'
     order by p.id
     limit :most)
) as l
group by 1, 2, 3, 4, 5, 6, 7
order by 1, 2, 3, 4, 5, 6, 7

-- name: operations
-- The same of operations: those that are to be issued soonest, and the oldest of those that run. `is_late`: a poll of it
-- has been due for longer than a worker takes to come by.
select l.kind, l.queue, l.waiting_for, split_part(l.held_reason, ':', 1) as held,
    coalesce(l.poll_at <= clock.since, false) as is_late, l.until <= clock.since as is_overdue,
    l.claimed and l.until <= clock.since as is_past_claim, count(*) as rows, min(cast(l.id as text)) as id
from (select durable.durable_now() - make_interval(secs => :patience_seconds) as since) as clock, (
    (select o.id, o.kind, o.queue, o.waiting_for, o.held_reason, o.start_before as until,
        cast(null as timestamptz) as poll_at, false as claimed
     from durable.operations o
     where o.state = 'queued'
     order by o.start_before
     limit :most)
    union all
    (select o.id, o.kind, o.queue, o.waiting_for, o.held_reason, coalesce(o.deadline_at, o.patience_until),
        case when o.owner is null then o.due_at end, o.deadline_at is not null
     from durable.operations o
     where o.state = 'running'
     order by o.id
     limit :most)
) as l
group by 1, 2, 3, 4, 5, 6, 7
order by 1, 2, 3, 4, 5, 6, 7

-- name: plan_queues
-- The queues in which a step waits for a worker; and whether one has done so for `patience_seconds`, though nobody paused
-- it and no sweep holds it. Of each queue those hinted longest ago are looked at, up to a limit. A receipt stamps
-- `continue_until` with the window of the consent, so the window before it is when the step began to wait.
with recursive hop (queue) as (
    (select p.queue
     from durable.plans p
     where p.state = 'approved' or (p.state = 'executing' and p.owner is null)
     order by p.queue
     limit 1)
    union all
    select (
        select p.queue
        from durable.plans p
        where (p.state = 'approved' or (p.state = 'executing' and p.owner is null)) and p.queue > h.queue
        order by p.queue
        limit 1)
    from hop h
    where h.queue is not null
),
pauses as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
)
select h.queue,
    bool_or(w.since <= (select durable.durable_now() - make_interval(secs => :patience_seconds))
        and w.held_reason is null
        and not exists (
            select from pauses p where (p.what, p.name) in (('queue', h.queue), ('kind', w.kind)))) as overdue
from hop h
cross join lateral (
    select p.kind, p.held_reason,
        case p.state when 'approved' then p.approved_at
            else p.continue_until - (p.expires_at - p.created_at) end as since
    from durable.plans p
    where (p.state = 'approved' or (p.state = 'executing' and p.owner is null)) and p.queue = h.queue
    order by p.hint_at
    limit :most
) as w
where h.queue is not null
group by h.queue
order by h.queue

-- name: operation_queues
-- The same of operations that are to be issued, or polled, by now. A pause holds no poll.
with recursive hop (queue) as (
    (select o.queue
     from durable.operations o
     where o.state = 'queued' or (o.state = 'running' and o.owner is null)
     order by o.queue
     limit 1)
    union all
    select (
        select o.queue
        from durable.operations o
        where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.queue > h.queue
        order by o.queue
        limit 1)
    from hop h
    where h.queue is not null
),
pauses as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
)
select h.queue,
    bool_or(w.due_at <= (select durable.durable_now() - make_interval(secs => :patience_seconds))
        and w.held_reason is null
        and (w.state = 'running' or not exists (
            select from pauses p where (p.what, p.name) in (('queue', h.queue), ('kind', w.kind))))) as overdue
from hop h
cross join lateral (
    select o.kind, o.state, o.held_reason, o.due_at
    from durable.operations o
    where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.queue = h.queue
    order by o.hint_at
    limit :most
) as w
where h.queue is not null and w.due_at <= (select durable.durable_now())
group by h.queue
order by h.queue
