-- name: finished_until
-- The instant up to which rows that ended and journal lines are counted: whoever wrote one earlier has committed it, and a
-- replica has it. Null on a replica that does not know yet how far it is.
select durable.known_until() - make_interval(secs => :lag_seconds) as until

-- name: finished
-- The rows that ended after the place where the look before stopped, by the index of their end, at most the limit: how
-- many of each queue, kind and state, and of those that were sent each of three times by its bucket. `kept_at` and
-- `kept_id` are the last row read, `read` how many were.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
),
done as materialized (
    select d.id, d.queue, d.kind, d.state, d.due_at, d.claimed_at, d.created_at, d.finished_at
    from durable.deliveries d
    where d.state in ('sent', 'canceled', 'expired')
      and d.finished_at >= cast(:at as timestamptz)
      and d.finished_at <= (select c.until from clock c)
      and (d.finished_at, d.id) > (cast(:at as timestamptz), cast(:id as uuid))
    order by d.finished_at, d.id
    limit :limit
),
told as (
    select d.queue, d.kind, d.state as what, 0 as bucket, count(*) as rows, cast(0 as float8) as seconds
    from done d
    group by d.queue, d.kind, d.state
    union all
    select d.queue, d.kind, m.what, width_bucket(m.seconds, m.bounds), count(*), sum(m.seconds)
    from done d
    cross join lateral (
        select t.what, greatest(cast(extract(epoch from t.took) as float8), 0) as seconds, t.bounds
        from (values
            ('wait', d.claimed_at - d.due_at, cast(:wait_bounds as float8[])),
            ('duration', d.finished_at - d.claimed_at, cast(:duration_bounds as float8[])),
            ('latency', d.finished_at - d.created_at, cast(:latency_bounds as float8[]))
        ) as t (what, took, bounds)
    ) as m
    where d.state = 'sent' and m.seconds is not null
    group by d.queue, d.kind, m.what, width_bucket(m.seconds, m.bounds)
),
kept as (
    select d.finished_at, d.id from done d order by d.finished_at desc, d.id desc limit 1
)
select c.until, (select count(*) from done) as read, k.finished_at as kept_at, cast(k.id as text) as kept_id,
    t.queue, t.kind, t.what, t.bucket, t.rows, t.seconds
from clock c
left join kept k on true
left join told t on true

-- name: journal
-- The attempts whose end is in the journal, read on from where the look before stopped, at most the limit: the failed,
-- the lost and the cancelled, by the queue and kind of their row.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
),
lines as materialized (
    select j.row_id, j.seq, j.at, j.contract, j.move, j.from_state, j.to_state, j.reason
    from durable.journal j
    where j.at >= cast(:at as timestamptz)
      and j.at <= (select c.until from clock c)
      and (j.at, j.seq) > (cast(:at as timestamptz), cast(:id as bigint))
    order by j.at, j.seq
    limit :limit
),
ends as (
    select l.row_id,
        case
            when l.move in ('fail', 'fail late') or l.reason = 'TIMEOUT' then
                case l.to_state when 'pending' then 'retry' else l.to_state end
            when l.move = 'cancel' then 'cancelled'
            when l.to_state = 'dead' then 'dead'
            when l.reason in ('CLAIM_EXPIRED', 'CHILD_LOST') then 'lease_lost'
            else 'given_back'
        end as outcome,
        l.move not in ('fail', 'fail late') and l.reason in ('CLAIM_EXPIRED', 'CHILD_LOST', 'WORKER_LOST') as lost
    from lines l
    where l.contract = 'delivery'
      and (l.move in ('fail', 'fail late', 'reap', 'release', 'release late')
        or (l.move = 'cancel' and l.from_state = 'processing'))
),
told as (
    select d.queue, d.kind, e.outcome as what, count(*) as rows, count(*) filter (where e.lost) as lost
    from ends e
    join durable.deliveries d on d.id = e.row_id
    group by d.queue, d.kind, e.outcome
),
kept as (
    select l.at, l.seq from lines l order by l.at desc, l.seq desc limit 1
)
select c.until, (select count(*) from lines) as read, k.at as kept_at, k.seq as kept_id,
    t.queue, t.kind, t.what, t.rows, t.lost
from clock c
left join kept k on true
left join told t on true

-- name: steps
-- The plans that ended after the place where the look before stopped, by the index of their end, at most the limit: their
-- receipts by kind and outcome. A failed plan all of whose receipts are ok has none of the step that it failed at.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
),
ended as materialized (
    select p.id, p.kind, p.state, p.finished_at
    from durable.plans p
    where p.state in ('executed', 'failed', 'rejected', 'expired')
      and p.finished_at >= cast(:at as timestamptz)
      and p.finished_at <= (select c.until from clock c)
      and (p.finished_at, p.id) > (cast(:at as timestamptz), cast(:id as uuid))
    order by p.finished_at, p.id
    limit :limit
),
told as (
    select s.kind, s.what, count(*) as rows
    from (
        select r.kind, r.outcome as what
        from ended e
        cross join lateral (select r.kind, r.outcome from durable.plan_receipts r where r.plan_id = e.id) as r
        union all
        select e.kind, 'no_receipt'
        from ended e
        where e.state = 'failed'
          and not exists (select from durable.plan_receipts r where r.plan_id = e.id and r.outcome <> 'ok')
    ) as s
    group by s.kind, s.what
),
kept as (
    select e.finished_at, e.id from ended e order by e.finished_at desc, e.id desc limit 1
)
select c.until, (select count(*) from ended) as read, k.finished_at as kept_at, cast(k.id as text) as kept_id,
    t.kind, t.what, t.rows
from clock c
left join kept k on true
left join told t on true

-- name: polls
-- How often each running operation was polled: with an answer, and without. Every claim but the first, which issues, and
-- the one that is under way asked the other side.
select cast(o.id as text) as id, o.kind, o.polls as answered,
    greatest(o.fence - 1 - o.polls - cast(o.owner is not null and o.fence > 1 as integer), 0) as unanswered
from durable.operations o
where o.state = 'running'
order by o.id
limit :limit

-- name: operations_ended
-- The operations that ended after the place where the look before stopped, by the index of their end, at most the limit;
-- what came of each, and how often it was polled in all. A cancel raises the fence, and asks nobody.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
),
ended as materialized (
    select o.id, o.kind, o.state, o.error_code, o.polls, o.fence, o.finished_at
    from durable.operations o
    where o.state in ('succeeded', 'failed', 'canceled')
      and o.finished_at >= cast(:at as timestamptz)
      and o.finished_at <= (select c.until from clock c)
      and (o.finished_at, o.id) > (cast(:at as timestamptz), cast(:id as uuid))
    order by o.finished_at, o.id
    limit :limit
),
kept as (
    select e.finished_at, e.id from ended e order by e.finished_at desc, e.id desc limit 1
)
select c.until, (select count(*) from ended) as read, k.finished_at as kept_at, cast(k.id as text) as kept_id,
    cast(e.id as text) as id, e.kind,
    case when e.error_code = 'OUTCOME_UNKNOWN' and e.state = 'failed' then 'outcome_unknown' else e.state end as what,
    e.polls as answered,
    greatest(e.fence - 1 - e.polls - cast(e.state = 'canceled' as integer), 0) as unanswered
from clock c
left join kept k on true
left join ended e on true

-- name: enqueued
-- The rows whose ids were made after the one where the look before stopped, by the primary key, at most the limit. An id
-- begins with the millisecond at which its caller made it.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
),
bound as materialized (
    select c.until, cast(
        lpad(to_hex(cast(floor(extract(epoch from c.until) * 1000) as bigint)), 12, '0') || repeat('f', 20) as uuid) as id
    from clock c
),
written as materialized (
    select d.id, d.queue, d.kind
    from durable.deliveries d
    where d.id > cast(:id as uuid) and d.id <= (select b.id from bound b)
    order by d.id
    limit :limit
),
told as (
    select w.queue, w.kind, count(*) as rows from written w group by w.queue, w.kind
),
kept as (
    select w.id from written w order by w.id desc limit 1
)
select b.until, cast(b.id as text) as until_id, (select count(*) from written) as read, cast(k.id as text) as kept_id,
    t.queue, t.kind, t.rows
from bound b
left join kept k on true
left join told t on true

-- name: enqueued_until
-- The id up to which enqueued rows are counted, and its instant.
with clock as materialized (
    select durable.known_until() - make_interval(secs => :lag_seconds) as until
)
select c.until, cast(cast(
    lpad(to_hex(cast(floor(extract(epoch from c.until) * 1000) as bigint)), 12, '0') || repeat('f', 20) as uuid) as text
) as until_id
from clock c
