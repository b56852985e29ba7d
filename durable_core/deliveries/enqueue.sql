-- name: insert
-- before: the caller's transaction is open
-- after:  one pending row per element, which commits or vanishes with the caller's own
-- Arguments come as text: their canonical form, whose digest stands beside them.
insert into durable.deliveries
    (id, kind, queue, priority, key, arguments, digest, max_attempts, max_interruptions, due_at, hint_at, created_at)
select r.id, r.kind, r.queue, r.priority, r.key, cast(r.arguments as jsonb), r.digest,
    r.max_attempts, r.max_interruptions, due.at, due.at, clock.now
from jsonb_to_recordset(cast(:rows as jsonb)) as r (
        id uuid, kind text, queue text, priority smallint, key text, arguments text, digest text,
        max_attempts integer, max_interruptions integer, delay_seconds float8, eta timestamptz)
cross join (select durable.durable_now() as now) as clock
cross join lateral (
    select coalesce(r.eta, clock.now + make_interval(secs => r.delay_seconds)) as at
) as due

-- name: insert_keyed
-- before: a SAVEPOINT of ours is open in the caller's transaction
-- after:  one pending row per element whose key is free; the others are not written
-- locks:  a key that another open transaction is writing is waited for, as long as the lock timeout allows
-- Sorted by key, so that two callers of the same keys meet in one order and cannot deadlock.
with bounds as materialized (
    select current_setting('lock_timeout') as was, set_config('lock_timeout', :lock_timeout, true) as set
),
inserted as (
    insert into durable.deliveries
        (id, kind, queue, priority, key, arguments, digest, max_attempts, max_interruptions,
         due_at, hint_at, created_at)
    select r.id, r.kind, r.queue, r.priority, r.key, cast(r.arguments as jsonb), r.digest,
        r.max_attempts, r.max_interruptions, due.at, due.at, clock.now
    from bounds b
    cross join jsonb_to_recordset(cast(:rows as jsonb)) as r (
        id uuid, kind text, queue text, priority smallint, key text, arguments text, digest text,
        max_attempts integer, max_interruptions integer, delay_seconds float8, eta timestamptz)
    cross join (select durable.durable_now() as now) as clock
    cross join lateral (
        select coalesce(r.eta, clock.now + make_interval(secs => r.delay_seconds)) as at
    ) as due
    order by r.kind, r.key
    on conflict (kind, key) where key is not null do nothing
    returning id
)
select b.was, array(select cast(i.id as text) from inserted i) as inserted from bounds b

-- name: restore_bound
-- after: the caller's own lock timeout again
select set_config('lock_timeout', :was, true) as set

-- name: keyed
-- The rows that hold these keys, as far as this transaction sees them.
select cast(d.id as text) as id, d.kind, d.key, d.digest, d.state
from durable.deliveries d
join jsonb_to_recordset(cast(:keys as jsonb)) as k (kind text, key text) on k.kind = d.kind and k.key = d.key
where d.key is not null
