-- name: waiting
-- Of the rows of each queue that have waited longest, up to a limit a queue: their kinds, what they wait for, and
-- whether a sweep holds them. Reads by the index of due rows, whatever the backlog.
select q.queue, w.kind, w.waiting_for, w.held_reason is not null as held, count(*) as rows
from durable.waiting_queues() as q (queue), lateral (
    select d.kind, d.waiting_for, d.held_reason
    from durable.deliveries d
    where d.state = 'pending' and d.queue = q.queue and d.due_at <= (select durable.durable_now())
    order by d.due_at
    limit :most) as w
group by 1, 2, 3, 4
order by 1, 2, 3, 4

-- name: due
-- The queues in which a row is due; and whether one of those that have waited longest, up to a limit a queue, has done so
-- for `patience_seconds`, though nobody paused it and no sweep holds it.
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
pauses as materialized (
    select p.what, p.name
    from durable.pauses p
    where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
)
select h.queue,
    exists (
        select
        from (
            select d.kind, d.held_reason
            from durable.deliveries d
            where d.state = 'pending'
              and d.queue = h.queue
              and d.due_at <= (select durable.durable_now() - make_interval(secs => :patience_seconds))
            order by d.due_at
            limit :most) as w
        where w.held_reason is null
          and not exists (
              select from pauses p where (p.what, p.name) in (('queue', h.queue), ('kind', w.kind)))
    ) as overdue
from hop h
where h.queue is not null
  and exists (
      select
      from durable.deliveries d
      where d.state = 'pending' and d.queue = h.queue and d.due_at <= (select durable.durable_now()))
order by h.queue

-- name: held
-- The rows that run, by their state, and are held; few run at any time.
select d.queue, d.kind, count(*) as rows
from durable.deliveries d
where d.state = 'processing' and d.held_reason is not null
group by 1, 2
order by 1, 2

-- name: hold
-- What reap waits for, where it does.
select cast(extract(epoch from l.hold_until - durable.durable_now()) as float8) as seconds
from durable.loops l
where l.name = 'reap' and l.hold_until > (select durable.durable_now())

-- name: schedules
select s.kind, s.timezone, s.paused_by, s.paused_reason,
    cast(extract(epoch from durable.durable_now() - s.next_slot) as float8) as late_seconds,
    s.paused_at is not null and (s.paused_until is null or s.paused_until > (select durable.durable_now())) as is_paused
from durable.schedules s
order by s.kind
