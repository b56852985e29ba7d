-- name: by_id
select 'operation' as what, cast(o.id as text) as id, o.kind, o.queue, o.state
from durable.operations o
where o.id = cast(:id as uuid)

-- name: by_beginning
-- Between the first and the last id that begin so; the newest first.
select 'operation' as what, cast(o.id as text) as id, o.kind, o.queue, o.state
from durable.operations o
where o.id >= cast(:first as uuid) and o.id <= cast(:last as uuid)
order by o.id desc
limit :most

-- name: by_key
-- A key is a kind's own: look for it in each kind that has one.
with recursive hop (kind) as (
    (select o.kind from durable.operations o where o.key is not null order by o.kind limit 1)
    union all
    select (
        select o.kind from durable.operations o where o.key is not null and o.kind > h.kind order by o.kind limit 1)
    from hop h
    where h.kind is not null
)
select 'operation' as what, cast(n.id as text) as id, n.kind, n.queue, n.state
from hop h,
    lateral (
        select o.id, o.kind, o.queue, o.state
        from durable.operations o
        where o.kind = h.kind and o.key = cast(:key as text)
        limit 1
    ) as n
where h.kind is not null
order by n.kind
limit :most
