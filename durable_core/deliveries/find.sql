-- name: by_id
select 'delivery' as what, cast(d.id as text) as id, d.kind, d.queue, d.state
from durable.deliveries d
where d.id = cast(:id as uuid)

-- name: by_schedule
select 'schedule' as what, cast(s.id as text) as id, s.kind
from durable.schedules s
where s.id = cast(:id as uuid)

-- name: by_beginning
-- Between the first and the last id that begin so; the newest first.
select 'delivery' as what, cast(d.id as text) as id, d.kind, d.queue, d.state
from durable.deliveries d
where d.id >= cast(:first as uuid) and d.id <= cast(:last as uuid)
order by d.id desc
limit :most

-- name: by_key
-- A key is a kind's own: hop over the kinds that have keys, and look for it in each.
with recursive hop (kind) as (
    (select d.kind
     from durable.deliveries d
     where d.key is not null
     order by d.kind
     limit 1)
    union all
    select (
        select d.kind
        from durable.deliveries d
        where d.key is not null and d.kind > h.kind
        order by d.kind
        limit 1)
    from hop h
    where h.kind is not null
)
select 'delivery' as what, cast(n.id as text) as id, n.kind, n.queue, n.state
from hop h,
    lateral (
        select d.id, d.kind, d.queue, d.state
        from durable.deliveries d
        where d.kind = h.kind and d.key = cast(:key as text)
        limit 1
    ) as n
where h.kind is not null
order by n.kind
limit :most

-- name: by_ordering_key
-- Those of the line that wait, run or hold it up, the first of the line first.
select 'delivery' as what, cast(d.id as text) as id, d.kind, d.queue, d.state
from durable.deliveries d
where d.ordering_key = cast(:key as text)
  and (d.state in ('pending', 'processing') or (d.ordering_strict and d.state in ('failed', 'dead')))
order by d.created_at, d.id
limit :most
