-- name: ended
-- The newest failed and dead deliveries, and the beginning of what was said. The limit first, the kind after it: else
-- those of another kind would all be read.
with looked as materialized (
    select n.*
    from (
        (
            select d.id, d.kind, d.queue, d.state, d.error_code, d.error_message, d.finished_at
            from durable.deliveries d
            where d.state = 'failed' and d.discarded_at is null
            order by d.finished_at desc
            limit :looked_at
        )
        union all
        (
            select d.id, d.kind, d.queue, d.state, d.error_code, d.error_message, d.finished_at
            from durable.deliveries d
            where d.state = 'dead' and d.discarded_at is null
            order by d.finished_at desc
            limit :looked_at
        )
    ) as n
    order by n.finished_at desc
    limit :looked_at
)
select b.looked, cast(l.id as text) as id, l.kind, l.queue, l.state, l.error_code,
    left(l.error_message, :characters) as said, l.finished_at as at, cast(null as timestamptz) as due_at
from (select count(*) as looked from looked) as b
left join looked l on cast(:kind as text) is null or l.kind = :kind
order by l.finished_at desc

-- name: retrying
-- Deliveries that will be tried again after a failure or a lost worker, as the newest lines of the journal name them: no
-- index knows them among those that wait, and the journal has a line for each such end of an attempt. One that asked to
-- wait, or was given back at a shutdown, did not fail.
with looked as materialized (
    select j.row_id, j.seq, j.at, j.move, j.reason, j.to_state
    from durable.journal j
    order by j.seq desc
    limit :looked_at
),
last as materialized (
    select distinct on (l.row_id) l.row_id, l.at, l.reason
    from looked l
    where l.to_state = 'pending'
      and l.reason <> 'SHUTDOWN'
      and (l.move like 'fail%' or l.move like 'release%' or l.move like 'reap%')
    order by l.row_id, l.seq desc
),
failing as materialized (
    select n.*, l.at
    from last l,
        lateral (
            select d.id, d.kind, d.queue, d.state, d.error_code, left(d.error_message, :characters) as said, d.due_at
            from durable.deliveries d
            where d.id = l.row_id
              and d.state in ('pending', 'processing')
              -- What it said last is what this line is of.
              and d.error_code = l.reason
              and (cast(:kind as text) is null or d.kind = :kind)
            limit 1
        ) as n
)
select b.looked, cast(f.id as text) as id, f.kind, f.queue, f.state, f.error_code, f.said, f.at, f.due_at
from (select count(*) as looked from looked) as b
left join failing f on true
order by f.at desc
