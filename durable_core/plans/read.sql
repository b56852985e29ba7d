-- name: get
-- One plan. `ripe`: time alone has decided about it, and this transaction may write that down.
select cast(p.id as text) as id, p.origin, p.risk, p.rationale, p.steps, p.digest, p.scopes,
    p.self_approval, p.proposed_by, cast(p.compensates as text) as compensates, p.state, p.kind, p.queue,
    p.approved_by, p.approved_at, p.rejected_by, p.rejected_reason, p.fence, p.settled_fence, p.owner, p.owner_pid,
    p.owner_host, p.claimed_at, p.lease_expires_at, p.deadline_at, p.continue_until, p.waiting_for, p.held_reason,
    p.error_code, p.error_message, p.created_at, p.expires_at, p.finished_at,
    case p.state
        when 'pending' then p.expires_at <= (select durable.durable_now())
        when 'approved' then p.expires_at <= (select durable.durable_now())
        when 'executing' then coalesce(p.lease_expires_at, p.continue_until) <= (select durable.durable_now())
        else false
    end and p.held_reason is null and current_setting('transaction_read_only') = 'off' as ripe
from durable.plans p
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))

-- name: receipts
-- The receipts of a plan, in the order of its steps.
select cast(r.step as integer) as step, r.kind, r.outcome, r.output, r.error_code, r.error_message, r.at
from durable.plan_receipts r
where r.plan_id = cast(:id as uuid)
order by r.step

-- name: page
-- Newest first. The ids are made in order of time.
select cast(p.id as text) as id, p.origin, p.risk, p.rationale, p.steps, p.digest, p.scopes,
    p.self_approval, p.proposed_by, cast(p.compensates as text) as compensates, p.state, p.kind, p.queue,
    p.approved_by, p.approved_at, p.rejected_by, p.rejected_reason, p.fence, p.settled_fence, p.owner, p.owner_pid,
    p.owner_host, p.claimed_at, p.lease_expires_at, p.deadline_at, p.continue_until, p.waiting_for, p.held_reason,
    p.error_code, p.error_message, p.created_at, p.expires_at, p.finished_at
from durable.plans p
where (cast(:state as text) is null or p.state = cast(:state as text))
  and (cast(:origin as text) is null or p.origin = cast(:origin as text))
  and (cast(:after as uuid) is null or p.id < cast(:after as uuid))
order by p.id desc
limit :limit

-- name: there
-- Whether a plan of this id, and of this origin where one is said, is here.
select p.origin
from durable.plans p
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))

-- name: before
-- The proposal of the same origin that came before this one.
select cast(p.id as text) as id
from durable.plans p
where p.origin = cast(:origin as text)
  and (p.created_at, p.id) < (select o.created_at, o.id from durable.plans o where o.id = cast(:id as uuid))
order by p.created_at desc, p.id desc
limit 1

-- name: waiting
-- How many plans wait for a person, and since when the oldest does; how many run. Counts stop at a limit.
select
    (select cast(count(*) as integer) from (
        select from durable.plans p
        where p.state in ('pending', 'approved') and p.state = 'pending'
            and p.expires_at > (select durable.durable_now())
        limit :limit) as w) as pending,
    (select min(w.created_at) from (
        select p.created_at from durable.plans p
        where p.state in ('pending', 'approved') and p.state = 'pending'
            and p.expires_at > (select durable.durable_now())
        order by p.expires_at
        limit :limit) as w) as oldest_pending_at,
    (select cast(count(*) as integer) from (
        select from durable.plans p where p.state = 'executing' limit :limit) as w) as executing
