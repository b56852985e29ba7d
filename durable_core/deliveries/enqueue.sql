-- name: insert
-- before: the caller's transaction is open
-- after:  one pending row per element, which commits or vanishes with the caller's own
-- Arguments come as text: their canonical form, whose digest stands beside them.
insert into durable.deliveries
    (id, kind, queue, priority, key, arguments, digest, max_attempts, max_interruptions,
     ordering_key, ordering_strict, expires_at, due_at, hint_at, created_at, trace)
select r.id, r.kind, r.queue, r.priority, r.key, cast(r.arguments as jsonb), r.digest,
    r.max_attempts, r.max_interruptions, r.ordering_key, r.ordering_strict,
    coalesce(r.expires_at, clock.now + make_interval(secs => r.expires_seconds)), due.at, due.at, clock.now,
    r.trace
from jsonb_to_recordset(cast(:rows as jsonb)) as r (
        id uuid, kind text, queue text, priority smallint, key text, arguments text, digest text,
        max_attempts integer, max_interruptions integer, delay_seconds float8, eta timestamptz,
        ordering_key text, ordering_strict boolean, expires_seconds float8, expires_at timestamptz, trace text)
cross join (select durable.durable_now() as now) as clock
cross join lateral (
    select coalesce(r.eta, clock.now + make_interval(secs => r.delay_seconds)) as at
) as due
