-- One step of a plan, in the order of its life: take, keep, lock, settle; or `release`, in `unsettled.sql`.

-- name: take
-- before: approved and its consent not over, or executing, unowned and to be continued; its next step is of this kind;
--         not held back, not paused
-- after:  executing under a fence one higher, leased to this owner for as long as four leases of a delivery
-- locks:  the row, skipping it when somebody has it, and only then compared with the clock; no row back means there
--         was nothing to take
with paused as materialized (
    select s.what, s.name
    from durable.pauses s
    where s.ended_at is null and (s.until is null or s.until > (select durable.durable_now()))
),
candidate as materialized (
    select p.id, p.state, case p.state when 'approved' then p.expires_at else p.continue_until end as until
    from durable.plans p
    where p.id = cast(:id as uuid)
      and p.kind = any (cast(:kinds as text[]))
      and (p.state = 'approved' or (p.state = 'executing' and p.owner is null and p.receipts < p.step_count))
      and p.held_reason is null
      and not exists (select from paused s where s.name = case s.what when 'queue' then p.queue else p.kind end)
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from candidate) as after_the_lock
),
taken as (
    update durable.plans p
    set state = 'executing',
        fence = p.fence + 1,
        owner = :owner,
        owner_pid = :owner_pid,
        owner_host = :owner_host,
        claimed_at = clock.now,
        beat_at = clock.now,
        deadline_at = clock.now + make_interval(secs => :timeout_seconds),
        lease_expires_at = clock.now + make_interval(secs => least(4 * :lease_seconds, :timeout_seconds)),
        -- The window of the consent, anew from the start of the run; each receipt stamps it again.
        continue_until = case c.state when 'approved' then clock.now + (p.expires_at - p.created_at)
            else p.continue_until end,
        hints = 0,
        waiting_for = null
    from candidate c, clock
    where p.id = c.id and c.until > clock.now
    returning p.id, p.kind, p.fence, p.receipts, p.step_count, p.steps, p.scopes, p.deadline_at, p.owner_host,
        p.owner_pid, c.state as was
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, owner)
    select t.id, 'plan', 'take', t.was, 'executing', t.fence, 1, t.owner_host || ':' || t.owner_pid
    from taken t
    where t.was = 'approved'
)
select t.id, t.kind, t.fence, t.deadline_at, cast(t.receipts as integer) as step,
    cast(t.step_count as integer) as step_count, t.scopes,
    t.steps -> cast(t.receipts as integer) as planned,
    cast(t.steps -> cast(t.receipts as integer) -> 'arguments' as text) as arguments,
    t.steps -> cast(t.receipts + 1 as integer) ->> 'kind' as next_kind,
    t.steps -> cast(t.receipts + 1 as integer) ->> 'queue' as next_queue
from taken t

-- name: known
-- Whether a row of this id is here at all, whatever became of it.
select p.state from durable.plans p where p.id = cast(:id as uuid)

-- name: keep
-- before: executing and owned under these fences, the deadline ahead
-- after:  the lease runs anew, never past the deadline
-- locks:  the rows, skipping those that are locked: their holder is this process's own step
with bounds as materialized (
    -- A beat is worth less than its wait: with the standby gone, leases must not lapse.
    select set_config('synchronous_commit',
        case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as set
),
held as materialized (
    select h.id, h.fence
    from unnest(cast(:ids as uuid[]), cast(:fences as bigint[])) as h (id, fence)
),
mine as materialized (
    select p.id
    from bounds b, durable.plans p
    join held h on h.id = p.id and h.fence = p.fence
    where p.state = 'executing' and p.owner is not null and p.deadline_at > (select durable.durable_now())
    order by p.id
    for no key update of p skip locked
),
clock as materialized (
    select durable.durable_now() as now
),
kept as (
    update durable.plans p
    set lease_expires_at = least(clock.now + make_interval(secs => 4 * :lease_seconds), p.deadline_at),
        beat_at = clock.now
    from mine m, clock
    where p.id = m.id
    returning p.id
)
select h.id, h.fence,
    exists (select from kept k where k.id = h.id) as kept,
    exists (
        select from durable.plans p
        where p.id = h.id and p.fence = h.fence
            -- Settled under this fence: by this very step, whose commit came between two beats.
            and (p.settled_fence = h.fence or (p.state = 'executing' and p.owner is not null))
    ) as still_ours
from held h

-- name: lock
-- before: a transaction of ours has just begun; the row executing and owned under this fence, unsettled
-- after:  nobody else can take or heal it until this transaction ends; the session bears the name of the row and the
--         fence as long; no lock is waited for longer than it is told, until then or until `unbound`
-- locks:  the row, first of all in its transaction and outside any savepoint; no row back means the claim is lost
with bound as materialized (
    select current_setting('lock_timeout') as was, set_config('lock_timeout', :lock_timeout, true) as set,
        -- By this name a sweep knows whose lock it is, should it outlive the deadline.
        set_config('application_name', concat('durable ', cast(:id as text), ' ', cast(:fence as bigint)), true) as named
)
select p.state, cast(null as text) as reaped_as,
    cast(pg_current_xact_id() as text) as xid,
    b.was as lock_timeout_was
from bound b, durable.plans p
where p.id = cast(:id as uuid)
  and p.fence = :fence
  and p.settled_fence < :fence
  and p.state = 'executing'
  and p.owner is not null
for no key update of p

-- name: unbound
-- after:  the session's own bound again, for the time that user code has the transaction
select set_config('lock_timeout', :was, true) as set

-- name: settle
-- before: locked by `lock` in this very transaction
-- after:  the step has its receipt, nobody owns the plan, and it may be continued for the window of its consent; or it
--         has ended: executed with its last step, failed with the first that is not ok
-- locks:  the row, held already
-- A division by zero ends the transaction when the row was not settled: an effect never commits without its receipt.
with mine as materialized (
    select p.id, p.receipts
    from durable.plans p
    where p.id = cast(:id as uuid)
      and p.fence = :fence
      and p.settled_fence < :fence
      and p.state = 'executing'
      and p.owner is not null
      and cast(pg_current_xact_id() as text) = :xid
),
-- The plan's own guard asks for the receipt, so it is written first: the update reads from it.
receipt as (
    insert into durable.plan_receipts (plan_id, step, kind, outcome, fence, output, error_code, error_message)
    select m.id, m.receipts, :kind, :outcome, :fence, cast(:output as jsonb), cast(:error_code as text),
        cast(:error_message as text)
    from mine m
    returning plan_id, cast(step as integer) as step, outcome, at
),
settled as (
    update durable.plans p
    set state = case when r.outcome <> 'ok' then 'failed'
            when r.step + 1 = p.step_count then 'executed' else 'executing' end,
        receipts = p.receipts + 1,
        settled_fence = :fence,
        kind = case when r.outcome = 'ok' then coalesce(p.steps -> (r.step + 1) ->> 'kind', p.kind) else p.kind end,
        queue = case when r.outcome = 'ok' then coalesce(p.steps -> (r.step + 1) ->> 'queue', p.queue) else p.queue end,
        continue_until = r.at + (p.expires_at - p.created_at),
        hint_at = r.at + interval '10 s',
        hints = 0,
        held_reason = null,
        error_code = cast(:error_code as text),
        error_message = cast(:error_message as text),
        finished_at = case when r.outcome <> 'ok' or r.step + 1 = p.step_count then r.at end,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from receipt r
    where p.id = r.plan_id
    returning p.id, p.state, p.fence, r.step, p.owner_host, p.owner_pid, p.error_code
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason)
    select s.id, 'plan', 'settle', 'executing', s.state, s.fence, s.step + 1, s.owner_host || ':' || s.owner_pid,
        s.error_code
    from settled s
    where s.state <> 'executing'
)
select 1 / count(*) as settled from settled

-- name: current
-- The fence that refused us, for a sentence; nothing is locked.
select p.fence from durable.plans p where p.id = cast(:id as uuid)

-- name: remark_stale
-- before: this fence was held once, and what its owner had to report was refused
-- after:  one journal line says so; the row is untouched
-- locks:  the row against its deletion only; one that is being pruned is skipped
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, facts)
select p.id, 'plan', 'refused', p.state, p.state, :fence, cast(:reason as text),
    jsonb_build_object('reported', cast(:reported as text), 'current_fence', p.fence)
from durable.plans p
where p.id = cast(:id as uuid) and p.fence >= :fence
for key share skip locked

-- name: wait_for_handler
-- before: its next step was hinted to a worker that does not know its kind
-- after:  says so, for people; dispatch hints it again a little later, and the next claim clears the remark
-- locks:  the row, skipping it when somebody has it
with candidate as materialized (
    select p.id
    from durable.plans p
    where p.id = cast(:id as uuid) and p.kind = :kind
      and (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
    for no key update skip locked
)
update durable.plans p
set waiting_for = 'handler'
from candidate c
where p.id = c.id
returning p.id
