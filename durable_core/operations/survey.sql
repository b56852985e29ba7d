-- name: waiting
-- The operations that are to be issued, or polled, now or later, by queue and kind: of each queue those hinted longest
-- ago, up to its share. A hop over the index for each queue.
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
)
select h.queue, w.kind, count(*) as rows
from hop h
cross join lateral (
    select o.kind
    from durable.operations o
    where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.queue = h.queue
    order by o.hint_at
    limit :share
) as w
where h.queue is not null
group by h.queue, w.kind
