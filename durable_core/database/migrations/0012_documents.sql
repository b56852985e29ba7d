-- Documents: the current version of each, and of those before it as many as are kept.
-- Locks nothing of the host's and no table that is there; every object is new.

create table durable.documents (
    id         uuid        primary key,
    collection text        not null constraint collection_has_a_name check (length(collection) between 1 and 200),
    owner      text        not null constraint somebody_owns_it check (length(owner) between 1 and 200),
    content    jsonb       not null constraint content_is_an_object check (jsonb_typeof(content) = 'object'),
    version    bigint      not null default 0 constraint version_counts_up check (version >= 0),
    saved_by   text        not null constraint somebody_saved check (length(saved_by) between 1 and 200),
    source     text        not null constraint source_is_known check (source in ('user', 'ai')),
    save_id    uuid,
    why        text,
    created_at timestamptz not null,
    saved_at   timestamptz not null,
    deleted_at timestamptz,
    deleted_by text,
    constraint deleted_by_somebody check ((deleted_at is null) = (deleted_by is null))
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table durable.documents is
    'The current version of each document; a save names the version that it was made from, and that only goes up by one.';
comment on column durable.documents.content is 'The document. A payload.';
comment on column durable.documents.version is 'How many saves it has had, exactly; 0 as it was created.';
comment on column durable.documents.save_id is 'The name of the save that made this version: its repeat saves nothing.';
comment on column durable.documents.why is 'Why it was saved so, or deleted, where somebody said.';

-- Those of one collection, and of one owner, by age.
create index documents_of_collection on durable.documents (collection, id);
create index documents_of_owner on durable.documents (owner, id);

create table durable.document_revisions (
    document_id uuid        not null references durable.documents (id) on delete cascade,
    version     bigint      not null,
    content     jsonb       not null,
    saved_by    text        not null,
    source      text        not null,
    why         text,
    saved_at    timestamptz not null,
    reason      text        not null constraint reason_is_known check (reason in ('overwrite', 'delete')),
    created_at  timestamptz not null,
    primary key (document_id, version)
);

comment on table durable.document_revisions is
    'Each version of a document as it was before the next one, written with it; the oldest go first.';
comment on column durable.document_revisions.content is 'The document as it was. A payload.';
comment on column durable.document_revisions.reason is 'What ended this version: the next one, or the end of the document.';
comment on column durable.document_revisions.created_at is 'When it did.';

-- A document changes by a save or a deletion, each together with what it was before.
create function durable.guard_document() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'INSERT' then
        if new.version <> 0 or new.save_id is not null or new.deleted_at is not null then
            raise exception 'document %: a document begins at version 0, saved by nobody before', new.id
                using errcode = '55000', hint = 'Create it by Documents.create.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.deleted_at is null then
            raise exception 'document %: it is not deleted, and only deleted documents may go', old.id
                using errcode = '55000', hint = 'Delete it by Documents.delete first: that keeps what it was.';
        end if;
        return old;
    end if;
    if old.deleted_at is not null and new is distinct from old then
        raise exception 'document %: it was deleted, and nothing of it changes any more', old.id
            using errcode = '55000', hint = 'Create another document, of a revision of this one.';
    end if;
    if new.id <> old.id or new.collection <> old.collection or new.owner <> old.owner
        or new.created_at <> old.created_at then
        raise exception 'document %: what it is (id, collection, owner, created_at) never changes', old.id
            using errcode = '55000', hint = 'Create another document.';
    end if;
    if new is not distinct from old then
        return new;
    end if;
    if new.deleted_at is not null then
        if new.version <> old.version or new.content <> old.content or new.saved_by <> old.saved_by
            or new.saved_at <> old.saved_at or new.source <> old.source
            or new.save_id is distinct from old.save_id then
            raise exception 'document %: a deletion changes nothing but that it is deleted', old.id
                using errcode = '55000', hint = 'Save first, then delete.';
        end if;
    elsif new.version <> old.version + 1 then
        raise exception 'document %: each change is a version, which goes up by one (% to %)',
            old.id, old.version, new.version
            using errcode = '55000', hint = 'Somebody who saves on the version before would overwrite it unseen.';
    end if;
    if not exists (
        select from durable.document_revisions r
        where r.document_id = old.id and r.version = old.version and r.content = old.content
          and r.saved_by = old.saved_by and r.saved_at = old.saved_at and r.source = old.source
          and r.reason = case when new.deleted_at is null then 'overwrite' else 'delete' end
    ) then
        raise exception 'document %: version % would be gone without a revision of it', old.id, old.version
            using errcode = '55000', hint = 'The revision and what replaces it are written by one statement.';
    end if;
    return new;
end
$guard$;

create trigger guard_document before insert or update or delete on durable.documents
    for each row execute function durable.guard_document();

-- A revision is what a document was, and stays so. Those that go are the oldest: the newest stays with its document.
create function durable.guard_document_revision() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'INSERT' then
        -- Asked at the end of the statement, when the document has moved on; what it was its own guard has compared.
        if not exists (
            select from durable.documents d
            where d.id = new.document_id
              and (case new.reason
                  when 'delete' then d.deleted_at is not null and d.version = new.version
                  else d.deleted_at is null and d.version = new.version + 1
              end)
        ) then
            raise exception 'document %: version % is not the one that was just replaced or deleted',
                new.document_id, new.version
                using errcode = '55000', hint = 'History is written by a save or a deletion, together with it.';
        end if;
        return null;
    end if;
    if tg_op = 'DELETE' and not exists (
        select from durable.documents d
        where d.id = old.document_id
          and old.version >= case when d.deleted_at is null then d.version - 1 else d.version end
    ) then
        return old;
    end if;
    raise exception 'document %: % of its revision % is refused', old.document_id, tg_op, old.version
        using errcode = '55000', hint = 'A revision stays as it is; the oldest may go, the newest goes with its document.';
end
$guard$;

create trigger guard_document_revision before update or delete on durable.document_revisions
    for each row execute function durable.guard_document_revision();

create trigger guard_document_revision_written after insert on durable.document_revisions
    for each row execute function durable.guard_document_revision();

create trigger guard_truncate before truncate on durable.documents
    for each statement execute function durable.guard_truncate();

create trigger guard_truncate before truncate on durable.document_revisions
    for each statement execute function durable.guard_truncate();
