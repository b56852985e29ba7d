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
    s.paused_at is not null and (s.paused_until is null or s.paused_until > (select durable.durable_now())) as is_paused
from durable.schedules s
order by s.kind
