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
         ordering_key, ordering_strict, expires_at, due_at, hint_at, created_at, trace)
    select r.id, r.kind, r.queue, r.priority, r.key, cast(r.arguments as jsonb), r.digest,
        r.max_attempts, r.max_interruptions, r.ordering_key, r.ordering_strict,
        coalesce(r.expires_at, clock.now + make_interval(secs => r.expires_seconds)), due.at, due.at, clock.now,
        r.trace
    from bounds b
    cross join jsonb_to_recordset(cast(:rows as jsonb)) as r (
        id uuid, kind text, queue text, priority smallint, key text, arguments text, digest text,
        max_attempts integer, max_interruptions integer, delay_seconds float8, eta timestamptz,
        ordering_key text, ordering_strict boolean, expires_seconds float8, expires_at timestamptz, trace text)
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

-- name: replace
-- before: pending; of this kind and key
-- after:  pending with the new arguments and options under a fence one higher, so that nobody who had the old
--         arguments can report on it; its turn is kept, or counted anew where it is debounced
-- locks:  the row, waited for as long as the lock timeout allows
update durable.deliveries d
set arguments = cast(r.arguments as jsonb),
    digest = r.digest,
    queue = r.queue,
    priority = r.priority,
    expires_at = coalesce(r.expires_at, clock.now + make_interval(secs => r.expires_seconds)),
    fence = d.fence + 1,
    settled_fence = d.fence + 1,
    due_at = case when cast(:debounced as boolean)
        then clock.now + make_interval(secs => r.delay_seconds) else d.due_at end,
    hint_at = case when cast(:debounced as boolean)
        then clock.now + make_interval(secs => r.delay_seconds) else d.hint_at end,
    waiting_for = null
from jsonb_to_recordset(cast(:rows as jsonb)) as r (
        id uuid, queue text, priority smallint, arguments text, digest text, delay_seconds float8,
        expires_seconds float8, expires_at timestamptz),
    (select durable.durable_now() as now) as clock
where d.id = r.id and d.state = 'pending'
returning d.id

-- name: give_up_key
-- before: no longer pending, and its key is wanted by a delivery that is to carry newer arguments
-- after:  the same without its key, which the history keeps
-- locks:  the row, waited for as long as the lock timeout allows
with given_up as (
    update durable.deliveries d
    set key = null
    from (select b.id, b.key from durable.deliveries b where b.id = cast(:id as uuid)) as before
    where d.id = before.id and d.state <> 'pending' and d.key is not null
    returning d.id, d.state, d.fence, before.key
)
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, facts)
select g.id, 'delivery', 'give up key', g.state, g.state, g.fence, jsonb_build_object('key', g.key)
from given_up g
