-- What those who watch read is bounded, whatever was discarded. Nothing that older code uses is taken away.
-- Locks `deliveries` against writes while its two indexes are built, one reading of the table each. To them write
-- failures and acts of people, not the happy path.

-- What a person must look at: without what a person discarded, and each state by itself. Neither a million discarded
-- rows nor a million failed ones stand before the dead one that is looked for. The first look after a bulk discard passes
-- the entries that it left behind, and marks them; the next one does not.
create index deliveries_still_failed on durable.deliveries (finished_at)
    where state = 'failed' and discarded_at is null;
create index deliveries_still_dead on durable.deliveries (finished_at)
    where state = 'dead' and discarded_at is null;

-- The queues that something waits in, due or later, by name: a hop over the index for each, and none for its rows.
-- The planner takes it for a part of the statement that asks, so whoever wants a few of them says `limit`.
create function durable.waiting_queues() returns setof text
    language sql stable parallel safe
begin atomic
    with recursive hop (queue) as (
        (select d.queue
         from durable.deliveries d
         where d.state = 'pending'
         order by d.queue
         limit 1)
        union all
        select (
            select d.queue
            from durable.deliveries d
            where d.state = 'pending' and d.queue > h.queue
            order by d.queue
            limit 1)
        from hop h
        where h.queue is not null
    )
    select h.queue from hop h where h.queue is not null;
end;

-- The same as in 0002, by that function: volatile, so that it takes its locks when it is called.
create or replace function durable.due_queues() returns setof text
    language sql volatile
begin atomic
    select q.queue
    from durable.waiting_queues() as q (queue)
    where exists (
        select from durable.deliveries d
        where d.state = 'pending' and d.queue = q.queue and d.hint_at <= (select durable.durable_now()));
end;

-- Up to when this server knows what was committed: now, and on a replica the last commit that has reached it. Null
-- where none has since it started.
create function durable.known_until() returns timestamptz
    language sql volatile
    return case when pg_is_in_recovery() then pg_last_xact_replay_timestamp() else durable.durable_now() end;
