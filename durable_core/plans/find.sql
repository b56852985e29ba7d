-- name: by_id
select 'plan' as what, cast(p.id as text) as id, p.kind, p.queue, p.state
from durable.plans p
where p.id = cast(:id as uuid)

-- name: by_beginning
-- Between the first and the last id that begin so; the newest first.
select 'plan' as what, cast(p.id as text) as id, p.kind, p.queue, p.state
from durable.plans p
where p.id >= cast(:first as uuid) and p.id <= cast(:last as uuid)
order by p.id desc
limit :most

-- name: by_origin
-- The plans of one origin, newest first.
select 'plan' as what, cast(p.id as text) as id, p.kind, p.queue, p.state
from durable.plans p
where p.origin = cast(:origin as text)
order by p.created_at desc, p.id desc
limit :most
