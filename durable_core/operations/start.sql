-- name: insert
-- before: a SAVEPOINT of ours is open in the caller's transaction
-- after:  one queued row, with the line that says who started it; none where its key or its slot is taken
-- locks:  a key or a slot that another open transaction is writing is waited for, as long as the lock timeout allows
with bounds as materialized (
    select current_setting('lock_timeout') as was, set_config('lock_timeout', :lock_timeout, true) as set
),
inserted as (
    insert into durable.operations
        (id, kind, queue, priority, key, arguments, digest, trigger, started_by, one_in_flight, finds,
         patience_seconds, every_seconds, start_before, due_at, hint_at, created_at)
    select cast(:id as uuid), :kind, :queue, cast(:priority as smallint), cast(:key as text), cast(:arguments as jsonb),
        :digest, cast(:trigger as text), cast(:by as text), cast(:one_in_flight as boolean), cast(:finds as boolean),
        cast(:patience_seconds as float8), cast(:every_seconds as float8),
        clock.now + make_interval(secs => :start_seconds), clock.now, clock.now, clock.now
    from bounds b, (select durable.durable_now() as now) as clock
    on conflict do nothing
    returning id
),
journalled as (
    insert into durable.journal (row_id, contract, move, to_state, fence, by_whom, facts)
    select i.id, 'operation', 'start', 'queued', 0, cast(:by as text),
        jsonb_build_object('trigger', cast(:trigger as text))
    from inserted i
)
select b.was, exists (select from inserted) as inserted from bounds b

-- name: restore_bound
-- after: the caller's own lock timeout again
select set_config('lock_timeout', :was, true) as set

-- name: taken
-- What has the key, and what has the slot, as far as this transaction sees them.
select cast(o.id as text) as id, o.digest, o.state, true as by_key
from durable.operations o
where o.kind = :kind and o.key = cast(:key as text) and o.key is not null
union all
select cast(o.id as text), o.digest, o.state, false
from durable.operations o
where o.kind = :kind and o.one_in_flight and o.state in ('queued', 'running')

-- name: keyed
-- What has this key.
select cast(o.id as text) as id, o.digest, o.state
from durable.operations o
where o.kind = :kind and o.key = cast(:key as text) and o.key is not null
