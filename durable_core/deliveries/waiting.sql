-- name: ahead
-- The delivery that has to go before this one and all others of its line that do: nothing goes before that. It is one
-- that `is_behind` puts before this one, or a dead one that keeps such a one waiting. Reads what lives in the line. No
-- row where this one is the first, or has no ordering key.
with line as materialized (
    select o.id, o.kind, o.state, o.due_at, o.created_at, o.state = 'pending' and o.attempts > 0 as has_begun,
        case
            when o.state = 'processing' then true
            when o.state <> 'pending' then (o.created_at, o.id) < (d.created_at, d.id)
            when (o.attempts > 0) <> (d.attempts > 0) then o.attempts > 0
            else (o.attempts > 0 or o.due_at <= (select durable.durable_now()))
                and (o.created_at, o.id) < (d.created_at, d.id)
        end as is_ahead
    from durable.deliveries d, durable.deliveries o
    where d.id = cast(:id as uuid)
      and o.ordering_key = d.ordering_key
      and o.id <> d.id
      and (o.state in ('pending', 'processing') or (o.ordering_strict and o.state in ('failed', 'dead')))
      and o.discarded_at is null
),
begun as materialized (
    select l.created_at, l.id from line l where l.is_ahead and l.has_begun
)
select cast(l.id as text) as id, l.kind, l.state, l.due_at
from line l
where l.is_ahead
   or (l.state in ('failed', 'dead') and (l.created_at, l.id) < any (select b.created_at, b.id from begun b))
order by l.state = 'processing' desc,
    -- One that has not begun is itself behind any that has.
    l.state = 'pending' and not l.has_begun and exists (select from begun),
    l.created_at, l.id
limit 1
