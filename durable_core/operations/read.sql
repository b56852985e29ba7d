-- name: get
select cast(o.id as text) as id, o.kind, o.queue, o.priority, o.key, cast(o.arguments as text) as arguments, o.trigger,
    o.started_by, o.one_in_flight, o.finds, o.patience_seconds, o.every_seconds, o.state, o.issued_at,
    cast(o.external_ids as text) as external_ids, cast(o.external_statuses as text) as external_statuses, o.polls, o.polled_at, o.patience_until, o.outage_at, o.start_before,
    o.fence, o.settled_fence, o.owner, o.owner_pid, o.owner_host, o.claimed_at, o.beat_at, o.lease_expires_at,
    o.deadline_at, o.due_at, o.waiting_for, o.held_reason, o.error_code, o.error_message, o.canceled_by,
    o.canceled_reason, o.created_at, o.finished_at,
    o.state = 'running' and o.owner is null and o.held_reason is null
        and o.due_at <= (select durable.durable_now())
        -- One that was hinted has its hint in the queue: readers add none while no worker takes it.
        and o.hint_at <= (select durable.durable_now()) as poll_is_due
from durable.operations o
where o.id = cast(:id as uuid)

-- name: page
-- Newest first, by id: ids are in the order of time.
select cast(o.id as text) as id, o.kind, o.queue, o.priority, o.key, cast(o.arguments as text) as arguments, o.trigger,
    o.started_by, o.one_in_flight, o.finds, o.patience_seconds, o.every_seconds, o.state, o.issued_at,
    cast(o.external_ids as text) as external_ids, cast(o.external_statuses as text) as external_statuses, o.polls, o.polled_at, o.patience_until, o.outage_at, o.start_before,
    o.fence, o.settled_fence, o.owner, o.owner_pid, o.owner_host, o.claimed_at, o.beat_at, o.lease_expires_at,
    o.deadline_at, o.due_at, o.waiting_for, o.held_reason, o.error_code, o.error_message, o.canceled_by,
    o.canceled_reason, o.created_at, o.finished_at, false as poll_is_due
from durable.operations o
where (cast(:after as uuid) is null or o.id < cast(:after as uuid))
  and (cast(:state as text) is null or o.state = cast(:state as text))
  and (cast(:kind as text) is null or o.kind = cast(:kind as text))
  and (cast(:key as text) is null or o.key = cast(:key as text))
order by o.id desc
limit :limit

-- name: live
-- How many wait, run, and are overdue: past their patience, or not issued in time. Bounded, by the index of each.
select
    (select count(*) from (select from durable.operations o where o.state = 'queued' limit :count_limit) as q) as queued,
    (select count(*) from (select from durable.operations o where o.state = 'running' limit :count_limit) as r)
        as running,
    (select count(*) from (
        select from durable.operations o
        where o.state = 'queued' and o.start_before <= (select durable.durable_now())
        limit :count_limit) as s)
    + (select count(*) from (
        select from durable.operations o
        where o.state = 'running' and o.patience_until <= (select durable.durable_now())
        limit :count_limit) as t) as overdue
