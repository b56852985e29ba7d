-- What is due or will be, for a test that carries it out itself.

-- name: next_due
-- The queue of the most overdue row of these kinds, in this queue or any, past those that were just found taken.
select d.queue
from durable.deliveries d
where d.state = 'pending'
  and d.held_reason is null
  and d.due_at <= (select durable.durable_now())
  and d.kind = any (cast(:kinds as text[]))
  and (cast(:queue as text) is null or d.queue = :queue)
  and d.queue <> all (cast(:passed_over as text[]))
order by d.due_at, d.created_at
limit 1

-- name: next_later
-- When the next such row that is not due yet will be, and in how many seconds.
select d.due_at, extract(epoch from d.due_at - clock.now) as seconds
from durable.deliveries d, (select durable.durable_now() as now) as clock
where d.state = 'pending'
  and d.held_reason is null
  and d.due_at > clock.now
  and d.kind = any (cast(:kinds as text[]))
  and (cast(:queue as text) is null or d.queue = :queue)
order by d.due_at
limit 1

-- name: next_step
-- The plan, of these kinds of steps and in this queue or any, that may go on longest already; past those passed over.
select cast(p.id as text) as id, p.kind
from durable.plans p
where (p.state = 'approved' or (p.state = 'executing' and p.owner is null))
  and p.held_reason is null
  and case p.state when 'approved' then p.expires_at else p.continue_until end > (select durable.durable_now())
  and p.kind = any (cast(:kinds as text[]))
  and (cast(:queue as text) is null or p.queue = :queue)
  and p.id <> all (cast(:passed_over as uuid[]))
order by p.hint_at
limit 1

-- name: next_operation
-- The most overdue operation of these kinds that is to be issued or polled, past those that were found taken.
select cast(o.id as text) as id, o.kind
from durable.operations o
where (o.state = 'queued' or (o.state = 'running' and o.owner is null))
  and o.held_reason is null
  and o.due_at <= (select durable.durable_now())
  and o.kind = any (cast(:kinds as text[]))
  and (cast(:queue as text) is null or o.queue = :queue)
  and cast(o.id as text) <> all (cast(:passed_over as text[]))
order by o.due_at, o.created_at
limit 1

-- name: next_later_operation
-- In how many seconds the next such one that is not due yet will be.
select extract(epoch from o.due_at - clock.now) as seconds
from durable.operations o, (select durable.durable_now() as now) as clock
where (o.state = 'queued' or (o.state = 'running' and o.owner is null))
  and o.held_reason is null
  and o.due_at > clock.now
  and o.kind = any (cast(:kinds as text[]))
  and (cast(:queue as text) is null or o.queue = :queue)
order by o.due_at
limit 1
