-- Operations: issued once outside, then polled.
-- Locks nothing of the host's, and no table that is there, but `journal` for the change of its guard; every object is new.

create table durable.operations (
    id                uuid        primary key,
    kind              text        not null constraint kind_has_a_name check (length(kind) between 1 and 200),
    queue             text        not null constraint queue_has_a_name check (length(queue) between 1 and 100),
    priority          smallint    not null default 5 constraint priority_0_is_most_urgent check (priority between 0 and 9),
    key               text        constraint key_fits_an_index check (octet_length(key) between 1 and 1000),
    arguments         jsonb       not null constraint arguments_by_name check (jsonb_typeof(arguments) = 'object'),
    digest            text        not null constraint digest_is_sha256 check (digest ~ '^[0-9a-f]{64}$'),
    trigger           text        not null default 'manual' constraint trigger_is_known
        check (trigger in ('manual', 'scheduled')),
    started_by        text        not null constraint somebody_started check (length(started_by) between 1 and 200),
    one_in_flight     boolean     not null,
    finds             boolean     not null,
    cancels           boolean     not null default false,
    patience_seconds  float8      not null constraint patience_is_a_time check (patience_seconds > 0),
    every_seconds     float8      not null constraint polls_take_a_time check (every_seconds > 0),
    state             text        not null default 'queued' constraint state_is_known
        check (state in ('queued', 'running', 'succeeded', 'failed', 'canceled')),
    issued_at         timestamptz,
    external_ids      jsonb       constraint external_ids_are_listed check (jsonb_typeof(external_ids) = 'array'),
    external_statuses jsonb       constraint statuses_by_id check (jsonb_typeof(external_statuses) = 'object'),
    polls             integer     not null default 0,
    polled_at         timestamptz,
    patience_until    timestamptz,
    outage_at         timestamptz,
    start_before      timestamptz not null,
    fence             bigint      not null default 0 constraint fence_counts_up check (fence >= 0),
    settled_fence     bigint      not null default 0 constraint settled_fence_was_held check (settled_fence <= fence),
    owner             text,
    owner_pid         integer,
    owner_host        text,
    claimed_at        timestamptz,
    beat_at           timestamptz,
    lease_expires_at  timestamptz,
    deadline_at       timestamptz,
    due_at            timestamptz not null,
    hint_at           timestamptz not null,
    hints             smallint    not null default 0,
    waiting_for       text        constraint waits_for_something_known check (waiting_for in ('handler', 'arguments')),
    held_reason       text,
    error_code        text,
    error_message     text,
    canceled_by       text,
    canceled_reason   text,
    created_at        timestamptz not null,
    finished_at       timestamptz,
    constraint owned_only_while_running check (
        (owner is null or state = 'running')
        and (owner is null) = (lease_expires_at is null) and (owner is null) = (deadline_at is null)),
    constraint issued_once_it_runs check (
        (state <> 'queued' or issued_at is null)
        and (state not in ('running', 'succeeded') or (issued_at is not null and patience_until is not null))),
    constraint ids_only_of_what_was_issued check (external_ids is null or issued_at is not null),
    constraint canceled_by_somebody check ((state = 'canceled') = (canceled_by is not null)),
    constraint finished_exactly_when_terminal check (
        (state in ('succeeded', 'failed', 'canceled')) = (finished_at is not null))
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table durable.operations is
    'Calls of other sides that are issued at most once, ever, and then polled until they ended.';
comment on column durable.operations.fence is
    'Grows at every claim and every operator move that takes work away; the number each write of an owner must name.';
comment on column durable.operations.settled_fence is
    'The fence of the last claim that reported. A report needs fence = its own and settled_fence < its own.';
comment on column durable.operations.issued_at is
    'When a worker claimed it to issue the call: from then on nobody issues it again, whether the call got through or not.';
comment on column durable.operations.external_ids is
    'What the other side calls it, known once the call has answered; null while the outcome of the call is unknown.';
comment on column durable.operations.patience_until is
    'Until when the other side may be silent; renewed by each good poll.';
comment on column durable.operations.cancels is
    'Whether the other side can be asked to stop it, which is done once after it was canceled.';
comment on column durable.operations.outage_at is
    'When patience was renewed because our own polls had not been made; once, until the next good poll.';
comment on column durable.operations.start_before is
    'One that is still queued by then fails, and frees its slot.';
comment on column durable.operations.due_at is
    'When it was to be issued, or is to be polled next.';

-- One row per (kind, key) while the row is kept.
create unique index operations_key on durable.operations (kind, key) where key is not null;
-- One at a time of a kind that says so: the slot is free once the row ended.
create unique index operations_one_in_flight on durable.operations (kind)
    where one_in_flight and state in ('queued', 'running');
-- To be hinted, the longest unhinted first.
create index operations_due on durable.operations (queue, hint_at)
    where state = 'queued' or (state = 'running' and owner is null);
-- Reap: few rows at any time; the lease is a filter, for no index may cover what a heartbeat writes.
create index operations_running on durable.operations (id) where state = 'running';
create index operations_starting on durable.operations (start_before) where state = 'queued';
-- Prune.
create index operations_finished on durable.operations (finished_at) where state in ('succeeded', 'failed', 'canceled');

create trigger guard_truncate before truncate on durable.operations
    for each statement execute function durable.guard_truncate();

create or replace function durable.guard_journal() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'DELETE' then
        if not exists (select from durable.deliveries d where d.id = old.row_id)
            and not exists (select from durable.plans p where p.id = old.row_id)
            and not exists (select from durable.operations o where o.id = old.row_id) then
            return old;
        end if;
        raise exception 'journal of %: a line stays while its row lives', old.row_id
            using errcode = '55000', hint = 'Lines go with their row when its retention is over.';
    end if;
    raise exception 'the journal is append only: % is refused', tg_op
        using errcode = '55000', hint = 'Add a line instead.';
end
$guard$;

-- What the sweeps look for as they begin; volatile for the reason given in 0002.
create function durable.an_operation_is_due() returns boolean
    language sql volatile
    return exists (
        select from durable.operations o
        where (o.state = 'queued' or (o.state = 'running' and o.owner is null))
          and o.due_at <= (select durable.durable_now()));

create function durable.an_operation_is_abandoned() returns boolean
    language sql volatile
    return exists (
        select from durable.operations o
        where o.state = 'running' and o.held_reason is null
          and (o.lease_expires_at <= (select durable.durable_now())
              or (o.owner is null and o.patience_until <= (select durable.durable_now()))));

create function durable.an_operation_is_overdue() returns boolean
    language sql volatile
    return exists (
        select from durable.operations o
        where o.state = 'queued' and o.held_reason is null and o.start_before <= (select durable.durable_now()));

create function durable.an_operation_was_canceled() returns boolean
    language sql volatile
    return exists (
        select from durable.operations o
        where o.state in ('succeeded', 'failed', 'canceled')
          and o.finished_at > (select durable.durable_now() - interval '60 s')
          and o.state = 'canceled' and o.cancels);
