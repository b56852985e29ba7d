-- name: by_id
select 'document' as what, cast(d.id as text) as id, d.collection as kind,
    case when d.deleted_at is not null then 'deleted' end as state
from durable.documents d
where d.id = cast(:id as uuid)

-- name: by_beginning
-- Between the first and the last id that begin so; the newest first.
select 'document' as what, cast(d.id as text) as id, d.collection as kind,
    case when d.deleted_at is not null then 'deleted' end as state
from durable.documents d
where d.id >= cast(:first as uuid) and d.id <= cast(:last as uuid)
order by d.id desc
limit :most
