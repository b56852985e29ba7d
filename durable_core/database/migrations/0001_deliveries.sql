-- Schema `durable`: the clock, the loops, the journal and the deliveries.
-- Locks nothing of the host's; every object is new. The schema itself is made by `migrate`, under its configured name.

-- The database's clock decides everything: never now(), which is the start of the transaction.
-- To find rows, compare with (select durable.durable_now()), so that an index condition can use it.
create function durable.durable_now() returns timestamptz
    language sql volatile parallel safe
    as $$ select pg_catalog.clock_timestamp() $$;

comment on function durable.durable_now() is
    'The clock of all durable work. A test database replaces it; a runtime role, which does not own it, cannot.';

create table durable.loops (
    name        text        primary key,
    began_at    timestamptz not null,
    ended_at    timestamptz,
    moved       bigint,
    error       text,
    host        text,
    hold_until  timestamptz
);

comment on table durable.loops is 'When each sweep last began and ended, what it moved, what went wrong.';
comment on column durable.loops.hold_until is
    'After an outage: nothing is taken from its owner before this instant, so that live workers can beat first.';

create table durable.journal (
    row_id       uuid        not null,
    seq          bigint      not null generated always as identity,
    contract     text        not null,
    move         text        not null,
    from_state   text,
    to_state     text,
    fence        bigint      not null,
    attempt      integer,
    owner        text,
    by_whom      text,
    reason       text,
    facts        jsonb,
    lease_before timestamptz,
    at           timestamptz not null default durable.durable_now(),
    xid          xid8        not null default pg_catalog.pg_current_xact_id(),
    primary key (row_id, seq)
);

comment on table durable.journal is
    'Every move but the happy path (claim, sent). Append only: no UPDATE, no TRUNCATE, no DELETE while the row lives.';

-- Whether the columns of a delivery that go together do: its CHECK constraints, in one function. Postgres reads the text of
-- a CHECK anew for each statement that writes, and a dozen of them cost it more than the claim.
create function durable.holds_together(
    state text, owner text, lease_expires_at timestamptz, deadline_at timestamptz, finished_at timestamptz,
    fence bigint, settled_fence bigint, attempts integer, interruptions integer, shutdowns integer, snoozes integer,
    max_attempts integer, max_interruptions integer, waiting_for text
) returns boolean
    language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
    as $check$
declare
    broken text := case
        when state not in ('pending', 'processing', 'sent', 'failed', 'dead', 'canceled', 'expired')
            then 'state_is_known'
        when (state = 'processing') <> (owner is not null)
            or (state = 'processing') <> (lease_expires_at is not null)
            or (state = 'processing') <> (deadline_at is not null)
            then 'owned_exactly_while_processing'
        when (state in ('sent', 'failed', 'dead', 'canceled', 'expired')) <> (finished_at is not null)
            then 'finished_exactly_when_terminal'
        when fence < 0 then 'fence_counts_up'
        when settled_fence > fence then 'settled_fence_was_held'
        when least(attempts, interruptions, shutdowns, snoozes) < 0
            or attempts < interruptions + shutdowns + snoozes
            then 'counters_add_up'
        when max_attempts < 1 then 'at_least_one_attempt'
        when max_interruptions < 0 then 'interruptions_budget'
        when waiting_for not in ('handler', 'arguments') then 'waits_for_something_known'
    end;
begin
    if broken is null then
        return true;
    end if;
    raise exception 'new row for relation "deliveries" violates check constraint "%"', broken
        using errcode = 'check_violation', table = 'deliveries', constraint = broken;
end
$check$;

create table durable.deliveries (
    id                uuid        primary key,
    kind              text        not null,
    queue             text        not null,
    priority          smallint    not null,
    key               text,
    arguments         jsonb       not null,
    digest            text        not null,
    state             text        not null default 'pending',
    due_at            timestamptz not null,
    hint_at           timestamptz not null,
    fence             bigint      not null default 0,
    settled_fence     bigint      not null default 0,
    attempts          integer     not null default 0,
    interruptions     integer     not null default 0,
    shutdowns         integer     not null default 0,
    snoozes           integer     not null default 0,
    max_attempts      integer     not null,
    max_interruptions integer     not null,
    owner             text,
    owner_pid         integer,
    owner_host        text,
    claimed_at        timestamptz,
    beat_at           timestamptz,
    lease_expires_at  timestamptz,
    deadline_at       timestamptz,
    waiting_for       text,
    held_reason       text,
    error_code        text,
    error_message     text,
    result            jsonb,
    created_at        timestamptz not null,
    finished_at       timestamptz,
    constraint holds_together check (durable.holds_together(
        state, owner, lease_expires_at, deadline_at, finished_at, fence, settled_fence, attempts, interruptions,
        shutdowns, snoozes, max_attempts, max_interruptions, waiting_for))
) with (
    -- Half of each page stays free, so that a heartbeat, which writes no indexed column,
    -- finds room beside the old version of the row (a HOT update) and no index grows.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on column durable.deliveries.fence is
    'Grows at every claim and every operator move that takes work away; the number each write of an owner must name.';
comment on column durable.deliveries.settled_fence is
    'The fence of the last claim that reported. A report needs fence = its own and settled_fence < its own.';
comment on column durable.deliveries.hint_at is
    'When it became due or was last hinted, whichever is later: dispatch serves the longest unhinted first.';
comment on column durable.deliveries.waiting_for is
    'A remark for people: a worker that got the hint does not know the kind, or its handler takes other arguments.';

-- One row per (kind, key) while the row is kept: retention is the window of de-duplication.
create unique index deliveries_key on durable.deliveries (kind, key) where key is not null;
-- Claims by queue, the most overdue first; and the age of the oldest due row.
create index deliveries_due on durable.deliveries (queue, due_at, created_at) where state = 'pending';
-- Dispatch: due and longest unhinted first.
create index deliveries_hint on durable.deliveries (queue, hint_at) where state = 'pending';
-- Reap: few rows at any time; the lease is a filter, for no index may cover what a heartbeat writes.
create index deliveries_processing on durable.deliveries (id) where state = 'processing';
-- Prune.
create index deliveries_finished on durable.deliveries (finished_at) where state in ('sent', 'canceled', 'expired');
-- What a person must look at.
create index deliveries_dead on durable.deliveries (finished_at) where state in ('dead', 'failed');

-- What a caller or a person writes into a delivery, looked at when it is written: none of this changes as it is carried out.
create function durable.check_delivery() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $check$
declare
    broken text := case
        when length(new.kind) not between 1 and 200 then 'kind_has_a_name'
        when length(new.queue) not between 1 and 100 then 'queue_has_a_name'
        when new.priority not between 0 and 9 then 'priority_0_is_most_urgent'
        when octet_length(new.key) not between 1 and 1000 then 'key_fits_an_index'
        when jsonb_typeof(new.arguments) <> 'object' then 'arguments_by_name'
        when new.digest !~ '^[0-9a-f]{64}$' then 'digest_is_sha256'
        when new.due_at >= '9000-01-01' then 'due_before_year_9000'
    end;
begin
    if broken is null then
        return new;
    end if;
    raise exception 'new row for relation "deliveries" violates check constraint "%"', broken
        using errcode = 'check_violation', table = 'deliveries', constraint = broken;
end
$check$;

create trigger check_delivery before insert or update of kind, queue, priority, key, arguments, digest, due_at
    on durable.deliveries for each row execute function durable.check_delivery();
