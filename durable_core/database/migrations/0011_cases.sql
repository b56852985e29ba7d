-- Cases: a state document each, the claims on them, their journal, their correlations and the events from outside.
-- Locks nothing of the host's and no table that is there; every object is new.

create table durable.cases (
    id            uuid        primary key,
    case_type     text        not null constraint type_has_a_name check (length(case_type) between 1 and 200),
    state         jsonb       not null,
    seq           bigint      not null default 0,
    ended_at      timestamptz,
    journal_count integer     not null default 0,
    journal_head  text        not null default repeat('0', 64)
        constraint head_is_sha256 check (journal_head ~ '^[0-9a-f]{64}$'),
    created_at    timestamptz not null,
    updated_at    timestamptz not null
) with (fillfactor = 70);

comment on table durable.cases is
    'A state document, changed only by the holder of its claim. It stores no position: what may happen next is asked of the state.';
comment on column durable.cases.state is 'The document. A payload.';
comment on column durable.cases.seq is 'How many commits it has had, exactly.';
comment on column durable.cases.ended_at is 'Dormant since then: it hides from sweeps, and nothing else.';
comment on column durable.cases.journal_head is
    'The chain of its newest journal entry; zeros before the first. Whoever keeps a copy can tell a cut journal.';

-- Those of one type, by age; what is not dormant, for a migration that goes through them.
create index cases_of_type on durable.cases (case_type, id);
create index cases_awake on durable.cases (case_type, id) where ended_at is null;

create table durable.case_claims (
    case_id      uuid        primary key references durable.cases (id),
    execution_id uuid        not null,
    step         text        not null,
    scope_key    text,
    request_id   uuid,
    attempt      integer     not null default 1 constraint attempts_from_1 check (attempt >= 1),
    claimed_at   timestamptz not null,
    heartbeat_at timestamptz not null,
    expires_at   timestamptz not null
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table durable.case_claims is
    'Who acts on a case: one execution at a time, by the primary key. Its execution_id is the fence. Gone when it settles.';

create table durable.case_journal (
    case_id        uuid        not null references durable.cases (id),
    number         integer     not null constraint counts_from_1 check (number >= 1),
    ordinal        bigint      not null generated always as identity,
    id             uuid        not null unique,
    execution_id   uuid        not null,
    request_id     uuid,
    entry          text        not null constraint entry_is_known
        check (entry in ('claimed', 'attempt-failed', 'completed', 'failed', 'expired')),
    attempt        integer     not null constraint attempts_from_1 check (attempt >= 1),
    step           text        not null,
    scope_key      text,
    as_of          timestamptz,
    seq            bigint,
    dormancy       text        constraint dormancy_is_known check (dormancy in ('ended', 'reopened')),
    actor          json,
    input          json,
    guard          json,
    state          json,
    delta          json,
    error          json,
    salt           text,
    payload_digest text        not null constraint payload_digest_is_sha256 check (payload_digest ~ '^[0-9a-f]{64}$'),
    digest         text        not null constraint digest_is_sha256 check (digest ~ '^[0-9a-f]{64}$'),
    chain          text        not null constraint chain_is_sha256 check (chain ~ '^[0-9a-f]{64}$'),
    keyed          boolean     not null,
    recorded_at    timestamptz not null,
    erased_at      timestamptz,
    erased_by      text,
    primary key (case_id, number),
    constraint when_it_was_claimed check ((entry = 'claimed') = (as_of is not null)),
    constraint which_commit_it_was check ((entry = 'completed') = (seq is not null)),
    constraint carries_no_more_than_its_kind check (
        (entry = 'claimed' or (input is null and guard is null and state is null))
        and (entry = 'completed' or (delta is null and dormancy is null))
        and (entry in ('attempt-failed', 'failed', 'expired') or error is null)
        and (entry <> 'expired' or actor is null)),
    constraint carries_what_its_kind_has check (
        erased_at is not null
        or (salt is not null
            and (entry <> 'claimed' or (guard is not null and state is not null))
            and (entry <> 'completed' or delta is not null)
            and (entry in ('claimed', 'completed') or error is not null))),
    constraint erased_by_somebody check ((erased_at is null) = (erased_by is null)),
    constraint erased_is_gone check (
        erased_at is null
        or (salt is null and actor is null and input is null and guard is null and state is null and delta is null
            and error is null))
);

comment on table durable.case_journal is
    'Every execution of a case, entry by entry, in order. Append only; the payload of an entry may be erased, once.';
comment on column durable.case_journal.state is
    'The state that the guard was evaluated on. json, not jsonb: its text stays as it was digested.';
comment on column durable.case_journal.request_id is
    'The delivery that asked for the execution, if one did: it completes once.';
comment on column durable.case_journal.digest is
    'SHA-256, or HMAC-SHA-256 where keyed, over what stays of the entry and the digest of its payload.';
comment on column durable.case_journal.chain is
    'The same over the chain of the entry before and this digest: an entry edited, missing or moved breaks it.';

-- One execution, which an unknown COMMIT is asked of.
create index case_journal_execution on durable.case_journal (execution_id, number);
-- A request completes once.
create unique index case_journal_request on durable.case_journal (request_id)
    where entry = 'completed' and request_id is not null;
-- Each commit has one entry, which its guard asks for.
create unique index case_journal_commit on durable.case_journal (case_id, seq) where entry = 'completed';
-- Since when a case was dormant at some entry of its journal.
create index case_journal_dormancy on durable.case_journal (case_id, number) where dormancy is not null;
-- What one step, and one scope key, has done to a case.
create index case_journal_step on durable.case_journal (case_id, step, number);
create index case_journal_scope on durable.case_journal (case_id, scope_key, number) where scope_key is not null;

create table durable.case_correlations (
    id          uuid        primary key,
    system      text        not null constraint system_has_a_name check (length(system) between 1 and 200),
    external_id text        not null constraint external_id_fits_an_index
        check (octet_length(external_id) between 1 and 1000),
    case_id     uuid        not null references durable.cases (id),
    scope_key   text,
    step        text,
    metadata    jsonb,
    created_at  timestamptz not null,
    updated_at  timestamptz not null,
    constraint one_case_of_an_identifier unique (system, external_id)
);

comment on table durable.case_correlations is
    'Whose event it is: what another system calls a thing of ours, and the case that waits for word of it.';

create index case_correlations_case on durable.case_correlations (case_id, id);

create table durable.case_events (
    id              uuid        primary key,
    system          text        not null,
    external_id     text        not null,
    type            text        not null,
    idempotency_key text        not null constraint key_fits_an_index
        check (octet_length(idempotency_key) between 1 and 2000),
    case_id         uuid,
    scope_key       text,
    step            text,
    status          text        not null default 'pending' constraint status_is_known
        check (status in ('pending', 'executed', 'dead-lettered')),
    reason          text,
    detail          text,
    execution_id    uuid,
    tries           integer     not null default 1,
    event           json        not null,
    received_at     timestamptz not null,
    pending_at      timestamptz not null,
    settled_at      timestamptz,
    constraint one_event_of_a_key unique (idempotency_key),
    constraint executed_by_an_execution check ((status = 'executed') = (execution_id is not null)),
    constraint dead_for_a_reason check ((status = 'dead-lettered') = (reason is not null)),
    constraint settled_unless_pending check ((status = 'pending') = (settled_at is null))
);

comment on table durable.case_events is
    'Events from outside, once each by their key, verbatim: the gate against doubles, and the list of dead letters.';
comment on column durable.case_events.pending_at is
    'Since when it is pending: as it came, or as it was last taken up again.';

-- What is stuck; dead letters, newest first, by what they are looked for.
create index case_events_pending on durable.case_events (pending_at) where status = 'pending';
create index case_events_dead on durable.case_events (id) where status = 'dead-lettered';
create index case_events_dead_system on durable.case_events (system, id) where status = 'dead-lettered';
create index case_events_dead_case on durable.case_events (case_id, id) where status = 'dead-lettered';
create index case_events_dead_reason on durable.case_events (reason, id) where status = 'dead-lettered';

-- A case's state changes by its claim alone, counted; its journal only grows.
create function durable.guard_case() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'INSERT' then
        if new.seq <> 0 or new.journal_count <> 0 or new.journal_head <> repeat('0', 64) or new.ended_at is not null then
            raise exception 'case %: a case begins with seq 0 and an empty journal, awake', new.id
                using errcode = '55000', hint = 'Create it by Cases.create.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        raise exception 'case %: a case is not deleted, for its journal would lose what it tells of', old.id
            using errcode = '55000', hint = 'End it, and erase the payload of its journal.';
    end if;
    if new.id <> old.id or new.case_type <> old.case_type or new.created_at <> old.created_at then
        raise exception 'case %: what it is (id, case_type, created_at) never changes', old.id
            using errcode = '55000', hint = 'Create another case.';
    end if;
    if new.seq < old.seq then
        raise exception 'case %: seq never falls (% to %)', old.id, old.seq, new.seq
            using errcode = '55000', hint = 'It counts the commits.';
    end if;
    if new.seq <> old.seq then
        if new.seq <> old.seq + 1 then
            raise exception 'case %: seq goes up by one (% to %)', old.id, old.seq, new.seq
                using errcode = '55000', hint = 'It counts the commits.';
        end if;
        if not exists (select from durable.case_claims c where c.case_id = old.id) then
            raise exception 'case %: nobody has claimed it', old.id
                using errcode = '55000', hint = 'State changes by an execution of a step, never by hand.';
        end if;
    elsif new.state <> old.state or new.ended_at is distinct from old.ended_at then
        raise exception 'case %: its state changes with its seq', old.id
            using errcode = '55000', hint = 'State changes by an execution of a step, never by hand.';
    end if;
    if new.journal_count <> old.journal_count or new.journal_head <> old.journal_head then
        if new.journal_count <> old.journal_count + 1 or not exists (
            select from durable.case_journal j
            where j.case_id = old.id and j.number = new.journal_count and j.chain = new.journal_head
        ) then
            raise exception 'case %: the head of its journal moves with an entry (% to %)',
                old.id, old.journal_count, new.journal_count
                using errcode = '55000', hint = 'An entry and the head of its case commit together.';
        end if;
    end if;
    return new;
end
$guard$;

create trigger guard_case before insert or update or delete on durable.cases
    for each row execute function durable.guard_case();

-- A state commits with its entry or not at all. Asked at COMMIT, for the writes of user code come between the two: who
-- ends the transaction there is refused.
create function durable.guard_case_commit() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if not exists (
        select from durable.case_journal j
        where j.case_id = new.id and j.seq = new.seq and j.entry = 'completed'
    ) then
        raise exception 'case %: seq % has no completed entry in its journal', new.id, new.seq
            using errcode = '55000', constraint = 'guard_case_commit',
                hint = 'A write of in_commit leaves COMMIT, and the time of deferred constraints, to the engine.';
    end if;
    return null;
end
$guard$;

create constraint trigger guard_case_commit after update of seq on durable.cases
    deferrable initially deferred
    for each row when (new.seq <> old.seq) execute function durable.guard_case_commit();

-- An entry is the next of its case and never changes, but that its payload is erased, whole and once.
create function durable.guard_case_entry() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    erased durable.case_journal := new;
begin
    if tg_op = 'INSERT' then
        if new.erased_at is not null or not exists (
            select from durable.cases c where c.id = new.case_id and c.journal_count + 1 = new.number
        ) then
            raise exception 'journal of case %: % is not the number of its next entry', new.case_id, new.number
                using errcode = '55000', hint = 'Entries are appended by the engine, under the lock of their case.';
        end if;
        return new;
    end if;
    if tg_op = 'UPDATE' and old.erased_at is null and new.erased_at is not null then
        erased := old;
        erased.salt := null;
        erased.actor := null;
        erased.input := null;
        erased.guard := null;
        erased.state := null;
        erased.delta := null;
        erased.error := null;
        erased.erased_at := new.erased_at;
        erased.erased_by := new.erased_by;
        if cast(to_json(erased) as text) = cast(to_json(new) as text) then
            return new;
        end if;
    end if;
    raise exception 'the journal of a case is append only: % is refused', tg_op
        using errcode = '55000', hint = 'The payload of an entry can be erased, by Cases.erase.';
end
$guard$;

create trigger guard_case_entry before insert or update or delete on durable.case_journal
    for each row execute function durable.guard_case_entry();

create trigger guard_truncate before truncate on durable.cases
    for each statement execute function durable.guard_truncate();

create trigger guard_truncate before truncate on durable.case_journal
    for each statement execute function durable.guard_truncate();

-- An event stays as it came, and one that was executed is settled for good.
create function durable.guard_case_event() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if old.status = 'executed' and new is distinct from old then
        raise exception 'event %: it was executed, and nothing of it changes any more', old.id
            using errcode = '55000', hint = 'Look at what it did: its execution_id is in the journal of the case.';
    end if;
    if new.id <> old.id or new.system <> old.system or new.external_id <> old.external_id or new.type <> old.type
        or new.idempotency_key <> old.idempotency_key or new.received_at <> old.received_at
        or cast(new.event as text) <> cast(old.event as text) then
        raise exception 'event %: it stays as it came', old.id
            using errcode = '55000', hint = 'Ingest another event.';
    end if;
    return new;
end
$guard$;

create trigger guard_case_event before update on durable.case_events
    for each row execute function durable.guard_case_event();
