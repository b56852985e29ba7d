-- name: settle
-- before: running under this fence, unsettled; its owner's lease may have lapsed, if nobody took it since
-- after:  what the owner has to report: the ids, the statuses, running and due later, or ended; the claim settled. Of a
--         report that neither renews nor ends, patience runs anew where our own polling had stood still before it, once
--         until the next good poll: no later look would see that any more
-- locks:  the row, in a CTE before its state is judged; no row back means the claim was lost
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
),
locked as materialized (
    select o.id, o.owner_host, o.owner_pid, o.due_at, o.claimed_at, o.lease_expires_at, o.outage_at,
        make_interval(secs => least(:outage_seconds, o.patience_seconds / 2)) as outage
    from bounds b, durable.operations o
    where o.id = cast(:id as uuid)
      and o.fence = :fence
      and o.settled_fence < :fence
      and o.state = 'running'
    for no key update of o
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
),
gap as materialized (
    -- The claim was late, or the report is: the lease has ended long ago, and of a claim that was taken back since its
    -- poll is due from then on. While the hook waited for the other side, it is that one that was silent.
    select l.id
    from locked l, clock
    where :to_state = 'running' and not cast(:renews as boolean) and l.outage_at is null
      and (l.due_at <= l.claimed_at - l.outage
        or greatest(coalesce(l.lease_expires_at, l.due_at), l.claimed_at + make_interval(secs => :asked_seconds))
            <= clock.now - l.outage)
),
settled as (
    update durable.operations o
    set state = :to_state,
        settled_fence = :fence,
        external_ids = coalesce(cast(:external_ids as jsonb), o.external_ids),
        external_statuses = coalesce(cast(:external_statuses as jsonb), o.external_statuses),
        polls = o.polls + cast(cast(:answered as boolean) as integer),
        polled_at = case when cast(:answered as boolean) then clock.now else o.polled_at end,
        patience_until = case when cast(:renews as boolean)
            then clock.now + make_interval(secs => o.patience_seconds + :provider_seconds)
            when exists (select from gap) then clock.now + make_interval(secs => o.patience_seconds)
            else o.patience_until end,
        outage_at = case when cast(:renews as boolean) then null
            when exists (select from gap) then clock.now else o.outage_at end,
        due_at = case when :to_state = 'running' then later.at else o.due_at end,
        hint_at = case when :to_state = 'running' then later.at else o.hint_at end,
        hints = 0,
        finished_at = case when :to_state = 'running' then null else clock.now end,
        held_reason = null,
        error_code = :error_code,
        error_message = :error_message,
        owner = null,
        lease_expires_at = null,
        deadline_at = null
    from locked l, clock, lateral (
        -- Of a poll that failed: the longer nobody answered, the seldomer it is asked.
        select clock.now + make_interval(secs => cast(:jitter as float8) * greatest(
            b.every_seconds,
            cast(:provider_seconds as float8),
            case when cast(:backs_off as boolean) then least(
                cast(:longest_seconds as float8),
                extract(epoch from clock.now - coalesce(b.polled_at, b.issued_at)) / 2) else 0 end)) as at
        from durable.operations b where b.id = l.id
    ) as later
    where o.id = l.id
    returning o.id, o.state, o.fence, o.due_at, o.external_ids, l.owner_host, l.owner_pid
),
journalled as (
    insert into durable.journal (row_id, contract, move, from_state, to_state, fence, owner, reason, facts)
    select s.id, 'operation', cast(:move as text), 'running', s.state, s.fence,
        s.owner_host || ':' || s.owner_pid, cast(:error_code as text),
        jsonb_build_object('external_operations', jsonb_array_length(s.external_ids))
    from settled s
    where cast(:move as text) is not null
    union all
    select s.id, 'operation', 'outage', 'running', 'running', s.fence, s.owner_host || ':' || s.owner_pid, 'OUTAGE', null
    from settled s join gap g on g.id = s.id
)
select s.state, s.due_at from settled s

-- name: resolve
-- before: a COMMIT whose answer was lost, or any doubt about who has the row
-- after:  nothing changes; the answer waits until the doubtful transaction has ended
-- locks:  the row, briefly: whoever still commits it is waited for, as long as the lock timeout allows
with bounds as materialized (
    select set_config('lock_timeout', :lock_timeout, true) as set
)
select o.fence, o.settled_fence, o.state, o.due_at
from bounds b, durable.operations o
where o.id = cast(:id as uuid)
for no key update of o

-- name: remark_stale
-- before: this fence was held once, and its report was refused
-- after:  one journal line says what the refused owner had to report; the row is untouched
-- locks:  the row against its deletion only; one that is being pruned is skipped, or the line would outlive its row
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, facts)
select o.id, 'operation', 'refused', o.state, o.state, :fence, cast(:reason as text),
    jsonb_build_object('current_fence', o.fence)
from durable.operations o
where o.id = cast(:id as uuid) and o.fence >= :fence
for key share skip locked
returning row_id
