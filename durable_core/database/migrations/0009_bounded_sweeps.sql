-- What the sweeps look for of plans and operations is bounded, whatever waits and whatever runs.
-- Locks `plans` and `operations` against writes while their indexes are built, one reading of the table each. Nothing that
-- older code uses is taken away.

-- How long a hint of a row that nobody takes is waited for before the next, by the hints that it had: 10 s, and twice as
-- long each time, up to ten minutes. Above 6 it doubles on: of rows that are hinted without knowing what lies in the queue.
create function durable.hint_wait(hints integer) returns interval
    language sql immutable parallel safe
    return make_interval(secs => case
        when hints < 0 then 0
        when hints <= 6 then least(10 * 2.0 ^ hints, 600)
        else 10 * 2.0 ^ least(hints, 24) end);

-- Each index has in its condition all that a sweep asks for: so it is the cheapest, whatever is known of the table.
-- Steps to be hinted, by queue, the longest unhinted first.
create index plans_hint on durable.plans (queue, hint_at)
    where (state = 'approved' or (state = 'executing' and owner is null)) and held_reason is null;
-- Those that were hinted unsure so often that their next hint is more than ten minutes after the last.
create index plans_unsure on durable.plans (queue, hint_at)
    where (state = 'approved' or (state = 'executing' and owner is null)) and held_reason is null and hints > 6;
-- Reap, and what dead processes held: those inside a step, as many as there are workers' slots. The lease is a filter,
-- for no index may cover what a heartbeat writes. Asked for with `owner > ''`, which is any: a condition on the index.
create index plans_owned on durable.plans (owner) where state = 'executing' and owner is not null;
-- Those between two steps with which nobody went on.
create index plans_left on durable.plans (continue_until)
    where state = 'executing' and owner is null and held_reason is null;

-- Expire.
create index plans_overdue on durable.plans (expires_at)
    where state in ('pending', 'approved') and held_reason is null;

-- Calls and polls to be hinted, each by an index of its own: many that are queued are not read before the polls. Those
-- that run are asked for as what waits and is not queued: else the planner might read all that run, by `operations_running`.
create index operations_calls on durable.operations (queue, hint_at) where state = 'queued' and held_reason is null;
create index operations_polls on durable.operations (queue, hint_at)
    where (state = 'queued' or (state = 'running' and owner is null)) and state <> 'queued' and held_reason is null;
create index operations_polls_due on durable.operations (queue, due_at)
    where (state = 'queued' or (state = 'running' and owner is null)) and state <> 'queued' and held_reason is null;
-- Those that were hinted unsure so often that their next hint is more than ten minutes after the last.
create index operations_calls_unsure on durable.operations (queue, hint_at)
    where state = 'queued' and held_reason is null and hints > 7;
create index operations_polls_unsure on durable.operations (queue, hint_at)
    where (state = 'queued' or (state = 'running' and owner is null)) and state <> 'queued' and held_reason is null
        and hints > 7;
-- Those that are due now, by queue.
create index operations_due_now on durable.operations (queue, due_at)
    where (state = 'queued' or (state = 'running' and owner is null)) and held_reason is null;
create index operations_owned on durable.operations (owner) where state = 'running' and owner is not null;
-- Those of which the other side was silent.
create index operations_silent on durable.operations (patience_until)
    where state = 'running' and owner is null and held_reason is null;
-- Expire.
create index operations_overdue on durable.operations (start_before) where state = 'queued' and held_reason is null;
-- Those of whose cancel the other side may have to hear.
create index operations_canceled on durable.operations (finished_at)
    where state = 'canceled' and cancels and external_ids is not null;

-- The queues that something waits in, by a hop over the index for each, as in 0006.
create function durable.plan_queues() returns setof text
    language sql stable parallel safe
begin atomic
    with recursive hop (queue) as (
        (select p.queue
         from durable.plans p
         where (p.state = 'approved' or (p.state = 'executing' and p.owner is null)) and p.held_reason is null
         order by p.queue
         limit 1)
        union all
        select (
            select p.queue
            from durable.plans p
            where (p.state = 'approved' or (p.state = 'executing' and p.owner is null)) and p.held_reason is null
              and p.queue > h.queue
            order by p.queue
            limit 1)
        from hop h
        where h.queue is not null
    )
    select h.queue from hop h where h.queue is not null;
end;

create function durable.operation_queues() returns setof text
    language sql stable parallel safe
begin atomic
    with recursive hop (queue) as (
        (select o.queue
         from durable.operations o
         where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.held_reason is null
         order by o.queue
         limit 1)
        union all
        select (
            select o.queue
            from durable.operations o
            where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.held_reason is null
              and o.queue > h.queue
            order by o.queue
            limit 1)
        from hop h
        where h.queue is not null
    )
    select h.queue from hop h where h.queue is not null;
end;

-- What the sweeps look for as they begin, as in 0007 and 0008. Each takes the first in the order of an index and looks
-- whether its time has come: a planner that is asked whether there is one whose time has come, and knows of many, would
-- read the table up to the first.
create or replace function durable.a_plan_is_due() returns boolean
    language sql volatile
    return exists (select from durable.plan_queues());

create or replace function durable.a_plan_is_abandoned() returns boolean
    language sql volatile
    return coalesce((
            select p.continue_until from durable.plans p
            where p.state = 'executing' and p.owner is null and p.held_reason is null
            order by p.continue_until
            limit 1) <= durable.durable_now(), false)
        or coalesce((
            select min(w.lease_expires_at)
            from (
                select p.lease_expires_at from durable.plans p
                where p.state = 'executing' and p.owner > '' and p.held_reason is null
                limit 10000
            ) as w) <= durable.durable_now(), false);

create or replace function durable.a_plan_is_overdue() returns boolean
    language sql volatile
    return coalesce((
        select p.expires_at from durable.plans p
        where p.state in ('pending', 'approved') and p.held_reason is null
        order by p.expires_at
        limit 1) <= durable.durable_now(), false);

create or replace function durable.an_operation_is_due() returns boolean
    language sql volatile
    return exists (
        select
        from durable.operation_queues() as q (queue)
        where (
            select o.due_at from durable.operations o
            where (o.state = 'queued' or (o.state = 'running' and o.owner is null)) and o.held_reason is null
              and o.queue = q.queue
            order by o.due_at
            limit 1) <= durable.durable_now());

create or replace function durable.an_operation_is_abandoned() returns boolean
    language sql volatile
    return coalesce((
            select o.patience_until from durable.operations o
            where o.state = 'running' and o.owner is null and o.held_reason is null
            order by o.patience_until
            limit 1) <= durable.durable_now(), false)
        or coalesce((
            select min(w.lease_expires_at)
            from (
                select o.lease_expires_at from durable.operations o
                where o.state = 'running' and o.owner > '' and o.held_reason is null
                limit 10000
            ) as w) <= durable.durable_now(), false);

create or replace function durable.an_operation_is_overdue() returns boolean
    language sql volatile
    return coalesce((
        select o.start_before from durable.operations o
        where o.state = 'queued' and o.held_reason is null
        order by o.start_before
        limit 1) <= durable.durable_now(), false);

create or replace function durable.an_operation_was_canceled() returns boolean
    language sql volatile
    return coalesce((
        select o.finished_at from durable.operations o
        where o.state = 'canceled' and o.cancels and o.external_ids is not null
        order by o.finished_at desc
        limit 1) > durable.durable_now() - interval '60 s', false);
