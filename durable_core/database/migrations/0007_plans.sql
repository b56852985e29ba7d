-- Plans, and the receipts of their steps.
-- Locks nothing of the host's, and no table that is there, but `journal` for the change of its guard; every object is new.

create table durable.plans (
    id               uuid        primary key,
    origin           text        constraint origin_fits_an_index check (octet_length(origin) between 1 and 1000),
    risk             text        not null constraint risk_is_known check (risk in ('low', 'medium', 'high')),
    rationale        text,
    steps            jsonb       not null constraint steps_are_listed check (jsonb_typeof(steps) = 'array'),
    step_count       smallint    not null constraint one_to_ten_steps
        check (step_count between 1 and 10 and step_count = jsonb_array_length(steps)),
    digest           text        not null constraint digest_is_sha256 check (digest ~ '^[0-9a-f]{64}$'),
    scopes           text[]      not null,
    self_approval    boolean     not null,
    proposed_by      text        not null constraint somebody_proposed check (length(proposed_by) between 1 and 200),
    compensates      uuid,
    state            text        not null default 'pending' constraint state_is_known
        check (state in ('pending', 'approved', 'executing', 'executed', 'failed', 'rejected', 'expired')),
    receipts         smallint    not null default 0 constraint receipts_of_its_steps
        check (receipts between 0 and step_count and (state <> 'executed' or receipts = step_count)),
    kind             text        not null,
    queue            text        not null constraint queue_has_a_name check (length(queue) between 1 and 100),
    priority         smallint    not null default 5 constraint priority_0_is_most_urgent check (priority between 0 and 9),
    approved_by      text,
    approved_at      timestamptz,
    approved_digest  text,
    rejected_by      text,
    rejected_reason  text,
    fence            bigint      not null default 0 constraint fence_counts_up check (fence >= 0),
    settled_fence    bigint      not null default 0 constraint settled_fence_was_held check (settled_fence <= fence),
    owner            text,
    owner_pid        integer,
    owner_host       text,
    claimed_at       timestamptz,
    beat_at          timestamptz,
    lease_expires_at timestamptz,
    deadline_at      timestamptz,
    continue_until   timestamptz,
    hint_at          timestamptz,
    hints            smallint    not null default 0,
    waiting_for      text        constraint waits_for_something_known check (waiting_for in ('handler')),
    held_reason      text,
    error_code       text,
    error_message    text,
    created_at       timestamptz not null,
    expires_at       timestamptz not null constraint expires_before_year_9000 check (expires_at < '9000-01-01'),
    finished_at      timestamptz,
    constraint owned_only_while_executing check (
        (owner is null or state = 'executing')
        and (owner is null) = (lease_expires_at is null) and (owner is null) = (deadline_at is null)),
    constraint approved_as_it_was_shown check (
        (state not in ('approved', 'executing', 'executed', 'failed'))
        or (approved_by is not null and approved_at is not null and approved_digest = digest)),
    constraint rejected_by_somebody check ((state = 'rejected') = (rejected_by is not null)),
    constraint continues_for_some_time check ((state <> 'executing') or continue_until is not null),
    constraint finished_exactly_when_terminal check (
        (state in ('executed', 'failed', 'rejected', 'expired')) = (finished_at is not null))
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table durable.plans is
    'What somebody proposed, frozen, for a person to approve: its steps run one by one, each with a receipt.';
comment on column durable.plans.steps is
    'The frozen payload: per step its kind, arguments, label, rationale and reviewed target. A payload.';
comment on column durable.plans.digest is
    'SHA-256 of the canonical form of what is proposed; an approval names it.';
comment on column durable.plans.fence is
    'Grows at every claim of a step; the number each write of an owner must name.';
comment on column durable.plans.settled_fence is
    'The fence of the last claim that reported. A report needs fence = its own and settled_fence < its own.';
comment on column durable.plans.receipts is
    'How many of its steps have a receipt; the index of the step that comes next.';
comment on column durable.plans.kind is
    'The kind of the step that comes next, or of the last.';
comment on column durable.plans.continue_until is
    'Until when the next step may be claimed; stamped anew by each receipt.';

-- Steps to be hinted, the longest unhinted first.
create index plans_due on durable.plans (queue, hint_at)
    where state = 'approved' or (state = 'executing' and owner is null);
-- Heal: few rows at any time; the lease is a filter, for no index may cover what a heartbeat writes.
create index plans_executing on durable.plans (id) where state = 'executing';
-- Expire; and what waits for a person.
create index plans_expiring on durable.plans (expires_at) where state in ('pending', 'approved');
-- The proposals of one origin.
create index plans_origin on durable.plans (origin, created_at, id) where origin is not null;
-- One compensation of a plan at a time, and none once one is done; and all that there were.
create unique index plans_compensates on durable.plans (compensates)
    where compensates is not null and state in ('pending', 'approved', 'executing', 'executed');
create index plans_compensations on durable.plans (compensates) where compensates is not null;
-- Prune.
create index plans_finished on durable.plans (finished_at) where state in ('executed', 'failed', 'rejected', 'expired');

create table durable.plan_receipts (
    plan_id       uuid        not null references durable.plans (id) on delete cascade,
    step          smallint    not null,
    kind          text        not null,
    outcome       text        not null constraint outcome_is_known check (outcome in ('ok', 'failed', 'conflict')),
    fence         bigint      not null,
    output        jsonb,
    error_code    text,
    error_message text,
    at            timestamptz not null default durable.durable_now(),
    primary key (plan_id, step),
    constraint why_it_is_not_ok check ((outcome = 'ok') = (error_code is null))
);

comment on table durable.plan_receipts is
    'One row per step that ran, committed together with its effect. Append only; gone with its plan.';

-- A receipt is written by the owner of the step, for the step that is next, and never changes.
create function durable.guard_receipt() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'INSERT' then
        if not exists (
            select from durable.plans p
            where p.id = new.plan_id and p.state = 'executing' and p.owner is not null
              and p.fence = new.fence and p.settled_fence < p.fence and p.receipts = new.step
        ) then
            raise exception 'receipt of plan %: step % is not the one that is claimed under fence %',
                new.plan_id, new.step, new.fence
                using errcode = '55000', hint = 'Only the worker that holds a step writes its receipt, once.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' and not exists (select from durable.plans p where p.id = old.plan_id) then
        return old;
    end if;
    raise exception 'receipt of plan %, step %: % is refused', old.plan_id, old.step, tg_op
        using errcode = '55000', hint = 'Receipts stay as they are while their plan is kept.';
end
$guard$;

create trigger guard_receipt before insert or update or delete on durable.plan_receipts
    for each row execute function durable.guard_receipt();

create trigger guard_truncate before truncate on durable.plans
    for each statement execute function durable.guard_truncate();

create trigger guard_truncate before truncate on durable.plan_receipts
    for each statement execute function durable.guard_truncate();

create or replace function durable.guard_journal() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
begin
    if tg_op = 'DELETE' then
        if not exists (select from durable.deliveries d where d.id = old.row_id)
            and not exists (select from durable.plans p where p.id = old.row_id) then
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
create function durable.a_plan_is_due() returns boolean
    language sql volatile
    return exists (
        select from durable.plans p
        where p.state = 'approved' or (p.state = 'executing' and p.owner is null));

create function durable.a_plan_is_abandoned() returns boolean
    language sql volatile
    return exists (
        select from durable.plans p
        where p.state = 'executing' and p.held_reason is null
          and coalesce(p.lease_expires_at, p.continue_until) <= (select durable.durable_now()));

create function durable.a_plan_is_overdue() returns boolean
    language sql volatile
    return exists (
        select from durable.plans p
        where p.state in ('pending', 'approved') and p.held_reason is null
          and p.expires_at <= (select durable.durable_now()));
