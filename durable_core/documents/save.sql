-- What changes a document. Each is one statement: the row locked, judged as it is under the lock, what it was kept, and
-- the change written. A row comes back where there is such a document; it says what there was, and what was done.

-- name: create
-- before: the caller's transaction is open
-- after:  one document at version 0, which commits or vanishes with the caller's own rows; no row back means that its id
--         is taken
with clock as materialized (
    select durable.durable_now() as now
)
insert into durable.documents
    (id, collection, owner, content, saved_by, source, why, created_at, saved_at)
select cast(:id as uuid), cast(:collection as text), cast(:owner as text), cast(:content as jsonb),
    cast(:by as text), cast(:source as text), cast(:why as text), clock.now, clock.now
from clock
on conflict (id) do nothing
returning cast(id as text) as id, collection, owner, content, version, saved_by, saved_at, source, created_at,
    deleted_at, why

-- name: save
-- before: not deleted, and at the version that the save was made from
-- after:  at the next version, with this content; the version before is a revision, and those beyond `keep` are gone
-- locks:  the row; whoever else saves it waits for the end of this transaction, and is judged by what it left
-- One statement sees the rows as they were when it began, so each part takes from the one before it what that wrote:
-- the update needs the revision, and the oldest go only once the document has moved on.
with locked as materialized (
    select d.id, d.content, d.version, d.saved_by, d.saved_at, d.source, d.why,
        coalesce(d.save_id = cast(:save_id as uuid), false) as same_id
    from durable.documents d
    where d.id = cast(:id as uuid) and d.collection = cast(:collection as text)
      and (cast(:owner as text) is null or d.owner = cast(:owner as text)) and d.deleted_at is null
    for no key update
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
kept as (
    insert into durable.document_revisions
        (document_id, version, content, saved_by, source, why, saved_at, reason, created_at)
    select l.id, l.version, l.content, l.saved_by, l.source, l.why, l.saved_at, 'overwrite', clock.now
    from locked l, clock
    where l.version = :expected and not l.same_id
    returning document_id, version, created_at
),
saved as (
    update durable.documents d
    set content = cast(:content as jsonb),
        version = k.version + 1,
        saved_by = cast(:by as text),
        source = cast(:source as text),
        save_id = cast(:save_id as uuid),
        why = cast(:why as text),
        saved_at = k.created_at
    from kept k
    where d.id = k.document_id
    returning d.id, d.version, d.saved_at
),
pruned as (
    delete from durable.document_revisions r
    using saved s
    where r.document_id = s.id and r.version < s.version - cast(:keep as bigint)
)
select l.version as was, l.saved_by, l.saved_at as was_saved_at, l.same_id,
    case when l.same_id then l.version - 1 = :expected and l.content = cast(:content as jsonb) else false end as repeated,
    s.version, s.saved_at
from locked l
left join saved s on s.id = l.id

-- name: let_go
-- before: a version that is to be restored is not kept
-- after:  nothing changed; a row back means that the current version was saved under this id, from the version expected,
--         and that this save kept no revision as old as the one to be restored
-- locks:  nothing
select d.version, d.saved_at
from durable.documents d
where d.id = cast(:id as uuid) and d.collection = cast(:collection as text)
  and (cast(:owner as text) is null or d.owner = cast(:owner as text)) and d.deleted_at is null
  and d.save_id = cast(:save_id as uuid) and d.version - 1 = :expected
  and :restored < d.version - cast(:keep as bigint)

-- name: delete
-- before: not deleted, and at the version that was looked at
-- after:  deleted, for good; what it was is its last revision, and those beyond `keep` are gone
-- locks:  the row, as `save` does
with locked as materialized (
    select d.id, d.content, d.version, d.saved_by, d.saved_at, d.source, d.why
    from durable.documents d
    where d.id = cast(:id as uuid) and d.collection = cast(:collection as text)
      and (cast(:owner as text) is null or d.owner = cast(:owner as text)) and d.deleted_at is null
    for no key update
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
kept as (
    insert into durable.document_revisions
        (document_id, version, content, saved_by, source, why, saved_at, reason, created_at)
    select l.id, l.version, l.content, l.saved_by, l.source, l.why, l.saved_at, 'delete', clock.now
    from locked l, clock
    where l.version = :expected
    returning document_id, version, created_at
),
saved as (
    update durable.documents d
    set deleted_at = k.created_at,
        deleted_by = cast(:by as text),
        why = cast(:why as text)
    from kept k
    where d.id = k.document_id
    returning d.id, d.version, d.deleted_at
),
pruned as (
    delete from durable.document_revisions r
    using saved s
    where r.document_id = s.id and r.version <= s.version - cast(:keep as bigint)
)
select l.version as was, l.saved_by, l.saved_at as was_saved_at, s.version
from locked l
left join saved s on s.id = l.id
