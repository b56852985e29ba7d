-- name: admit
-- before: no event of this key was ever taken in
-- after:  it is pending, as it came; no row back means that one is there, and reopen or known says more
-- locks:  the key, which waits for another transaction that is writing it
with clock as materialized (select durable.durable_now() as now)
insert into durable.case_events (id, system, external_id, type, idempotency_key, event, received_at, pending_at)
select cast(:id as uuid), :system, :external_id, :type, :idempotency_key, cast(:event as json), clock.now, clock.now
from clock
on conflict (idempotency_key) do nothing
returning cast(id as text) as id, tries, cast(event as text) as event

-- name: reopen
-- before: the event of this key is a dead letter of a reason that another delivery of it may mend
-- after:  it is pending once more, under a higher `tries`; no row back means that it is nothing of that kind
-- locks:  the event's row; of two who bring it again the second finds it pending
update durable.case_events e
set status = 'pending', reason = null, detail = null, settled_at = null, tries = e.tries + 1,
    pending_at = durable.durable_now()
where e.idempotency_key = :idempotency_key
  and e.status = 'dead-lettered' and e.reason in ('case-busy', 'execution-failed')
returning cast(e.id as text) as id, e.tries, cast(e.event as text) as event

-- name: known
-- The event of this key, as it stands.
select cast(e.id as text) as id, e.status, e.reason, e.detail, cast(e.case_id as text) as case_id, e.step, e.scope_key,
    cast(e.execution_id as text) as execution_id
from durable.case_events e
where e.idempotency_key = :idempotency_key

-- name: pending
-- An event that waits under this `tries`, as it came; no row means that somebody else took it up, or settled it.
select cast(e.id as text) as id, e.tries, cast(e.event as text) as event
from durable.case_events e
where e.id = cast(:id as uuid) and e.tries = :tries and e.status = 'pending'

-- name: executed
-- before: the event is pending under this `tries`; the transaction is the commit of the case
-- after:  it was executed, by this execution; no row back means that it is another's by now, and nothing may commit
-- locks:  the event's row, after the case's
update durable.case_events e
set status = 'executed', execution_id = cast(:execution_id as uuid), case_id = cast(:case_id as uuid), step = :step,
    scope_key = :scope_key, settled_at = durable.durable_now()
where e.id = cast(:id as uuid) and e.tries = :tries and e.status = 'pending'
returning cast(e.id as text) as id

-- name: bury
-- before: the event is pending under this `tries`
-- after:  it is a dead letter, with its reason; no row back means that it is another's by now
-- locks:  the event's row
update durable.case_events e
set status = 'dead-lettered', reason = :reason, detail = :detail, case_id = cast(:case_id as uuid), step = :step,
    scope_key = :scope_key, settled_at = durable.durable_now()
where e.id = cast(:id as uuid) and e.tries = :tries and e.status = 'pending'
returning cast(e.id as text) as id

-- name: dead_letters
-- Newest first. Each filter has an index of its own, in the order of the ids.
select cast(e.id as text) as id, e.system, e.external_id, e.type, e.reason, e.detail, cast(e.case_id as text) as case_id,
    e.step, e.scope_key, e.tries, cast(e.event as text) as event, e.received_at, e.settled_at
from durable.case_events e
where e.status = 'dead-lettered'
  and (cast(:system as text) is null or e.system = cast(:system as text))
  and (cast(:case_id as uuid) is null or e.case_id = cast(:case_id as uuid))
  and (cast(:reason as text) is null or e.reason = cast(:reason as text))
  and (cast(:after as uuid) is null or e.id < cast(:after as uuid))
order by e.id desc
limit :limit
