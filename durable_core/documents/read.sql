-- name: get
-- One document, of this collection and owner where they are said.
select cast(d.id as text) as id, d.collection, d.owner, d.content, d.version, d.saved_by, d.saved_at, d.source,
    d.created_at, d.deleted_at, d.why
from durable.documents d
where d.id = cast(:id as uuid)
  and (cast(:collection as text) is null or d.collection = cast(:collection as text))
  and (cast(:owner as text) is null or d.owner = cast(:owner as text))
  and (cast(:deleted as boolean) or d.deleted_at is null)

-- name: version
-- The version of a document of one collection, for who is going to change it in this transaction.
-- locks:  the row
select d.version
from durable.documents d
where d.id = cast(:id as uuid) and d.collection = cast(:collection as text) and d.deleted_at is null
for no key update

-- name: current
-- The current version of a document, as the first of its history; one that was deleted has none.
select d.version, case when cast(:contents as boolean) then d.content end as content, d.saved_by, d.saved_at, d.source,
    cast(null as text) as reason, d.why, d.deleted_at is not null as deleted
from durable.documents d
where d.id = cast(:id as uuid)
  and (cast(:collection as text) is null or d.collection = cast(:collection as text))
  and (cast(:owner as text) is null or d.owner = cast(:owner as text))
  and (cast(:deleted as boolean) or d.deleted_at is null)

-- name: revisions
-- The versions before it, newest first.
select r.version, case when cast(:contents as boolean) then r.content end as content, r.saved_by, r.saved_at, r.source,
    r.reason, r.why
from durable.document_revisions r
where r.document_id = cast(:id as uuid)
  and (cast(:before as bigint) is null or r.version < cast(:before as bigint))
order by r.version desc
limit :limit

-- name: revision
-- One version: the current one, or a revision; no version back where there is neither.
select case when r.version is not null or (d.version = :version and d.deleted_at is null) then :version end as version,
    case when r.version is not null then r.content when d.version = :version then d.content end as content,
    coalesce(r.saved_by, d.saved_by) as saved_by, coalesce(r.saved_at, d.saved_at) as saved_at,
    coalesce(r.source, d.source) as source, r.reason, case when r.version is not null then r.why else d.why end as why
from durable.documents d
left join durable.document_revisions r on r.document_id = d.id and r.version = :version
where d.id = cast(:id as uuid)
  and (cast(:collection as text) is null or d.collection = cast(:collection as text))
  and (cast(:owner as text) is null or d.owner = cast(:owner as text))
  and (cast(:deleted as boolean) or d.deleted_at is null)

-- name: page
-- Newest first. The ids are made in order of time.
select cast(d.id as text) as id, d.collection, d.owner, cast(null as jsonb) as content, d.version, d.saved_by,
    d.saved_at, d.source, d.created_at, d.deleted_at, d.why
from durable.documents d
where (cast(:collection as text) is null or d.collection = cast(:collection as text))
  and (cast(:owner as text) is null or d.owner = cast(:owner as text))
  and (cast(:deleted as boolean) or d.deleted_at is null)
  and (cast(:after as uuid) is null or d.id < cast(:after as uuid))
order by d.id desc
limit :limit
