-- name: waiting
-- The steps that wait for a worker, by queue and kind: of each queue those hinted longest ago, up to its share. A hop over
-- the index for each queue.
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
)
select h.queue, w.kind, count(*) as rows
from hop h
cross join lateral (
    select p.kind
    from durable.plans p
    where (p.state = 'approved' or (p.state = 'executing' and p.owner is null)) and p.queue = h.queue
    order by p.hint_at
    limit :share
) as w
where h.queue is not null
group by h.queue, w.kind
