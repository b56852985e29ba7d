-- name: release
-- before: processing, or pending after a reap, under this fence, unsettled
-- after:  pending and due later, or failed, or dead; the error kept, the claim settled, one failure, interruption,
--         shutdown or snooze counted; an interruption that a reap booked for the same claim is taken back
-- locks:  the row, in a CTE before its state is judged; no row back means the claim was lost
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
),
locked as materialized (
    select d.id, d.state, d.error_code, d.lease_expires_at
    from bounds b, durable.deliveries d
    where d.id = cast(:id as uuid)
      and d.fence = :fence
      and d.settled_fence < :fence
      and d.state in ('processing', 'pending')
    for no key update of d
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
released as (
    update durable.deliveries d
    set state = :to_state,
        settled_fence = :fence,
        interruptions = d.interruptions + cast(:counted = 'interruption' as integer)
            - cast(l.state = 'pending' and l.error_code in ('CLAIM_EXPIRED', 'CHILD_LOST') as integer),
        shutdowns = d.shutdowns + cast(:counted = 'shutdown' as integer)
            - cast(l.state = 'pending' and l.error_code = 'SHUTDOWN' as integer),
        snoozes = d.snoozes + cast(:counted = 'snooze' as integer),
        due_at = case when :to_state = 'pending'
            then clock.now + make_interval(secs => :delay_seconds) else d.due_at end,
        hint_at = case when :to_state = 'pending'
            then clock.now + make_interval(secs => :delay_seconds) else d.hint_at end,
        finished_at = case when :to_state = 'pending' then null else clock.now end,
        waiting_for = :waiting_for,
        held_reason = null,
        error_code = :error_code,
        error_message = :error_message,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from locked l, clock
    where d.id = l.id
    returning d.id, d.state, d.fence, d.attempts, d.owner_host, d.owner_pid, d.due_at,
        l.state as from_state, l.lease_expires_at as lease_before
),
journalled as (
    insert into durable.journal
        (row_id, contract, move, from_state, to_state, fence, attempt, owner, reason, facts, lease_before)
    select r.id,
        'delivery', cast(:move as text) || case when r.from_state = 'pending' then ' late' else '' end,
        r.from_state, r.state, r.fence, r.attempts,
        r.owner_host || ':' || r.owner_pid, cast(:error_code as text),
        jsonb_build_object('error', cast(:error_message as text), 'due_at', r.due_at),
        r.lease_before
    from released r
    -- A row may be put off every minute, by its handler or until the right worker is deployed; the history keeps the
    -- first of each reason.
    where cast(:move as text) not in ('postpone', 'snooze') or not exists (
        select from durable.journal j
        where j.row_id = r.id and j.move = cast(:move as text) and j.reason = cast(:error_code as text))
)
select r.state, r.due_at from released r

-- name: resolve
-- before: a COMMIT whose answer was lost, or any doubt about who has the row
-- after:  nothing changes; the answer waits until the doubtful transaction has ended
-- locks:  the row, briefly: whoever still commits it is waited for, as long as the lock timeout allows
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
)
select d.fence, d.settled_fence, d.state, d.due_at
from bounds b, durable.deliveries d
where d.id = cast(:id as uuid)
for no key update of d
