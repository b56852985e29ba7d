-- name: release
-- before: executing and owned under this fence, unsettled; nothing of its step stands
-- after:  `executing`, and nobody's: the step is hinted again; or `failed` with no receipt of it. The claim is settled
-- locks:  the row, before its state is judged; no row back means the claim was lost
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
),
locked as materialized (
    select p.id, p.lease_expires_at
    from bounds b, durable.plans p
    where p.id = cast(:id as uuid)
      and p.fence = :fence
      and p.settled_fence < :fence
      and p.state = 'executing'
      and p.owner is not null
    for no key update of p
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
released as (
    update durable.plans p
    set state = :to_state,
        settled_fence = :fence,
        hint_at = clock.now + interval '10 s',
        -- What kept the database from taking the step is not to end the plan: somebody has a lease's time to take it.
        continue_until = greatest(p.continue_until, clock.now + interval '120 s'),
        hints = 0,
        held_reason = null,
        error_code = case when :to_state = 'failed' then cast(:error_code as text) end,
        error_message = case when :to_state = 'failed' then cast(:error_message as text) end,
        finished_at = case when :to_state = 'failed' then clock.now end,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from locked l, clock
    where p.id = l.id
    returning p.id, p.state, p.fence, p.receipts, p.owner_host, p.owner_pid, l.lease_expires_at as lease_before
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, facts, lease_before)
    select r.id, 'plan', 'release', 'executing', r.state, r.fence, r.receipts + 1,
        r.owner_host || ':' || r.owner_pid, cast(:error_code as text),
        jsonb_build_object('error', cast(:error_message as text)), r.lease_before
    from released r
)
select r.state from released r

-- name: resolve
-- before: a COMMIT whose answer was lost, or any doubt about who has the row
-- after:  nothing changes; the answer waits until the doubtful transaction has ended
-- locks:  the row, briefly: whoever still commits it is waited for, as long as the lock timeout allows
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
)
select p.fence, p.settled_fence, p.state, cast(p.receipts as integer) as receipts
from bounds b, durable.plans p
where p.id = cast(:id as uuid)
for no key update of p
