-- name: newest
-- The newest lines of all rows, or of one, and how far was looked. The bound on what is read comes first, the filters
-- after it: a move that hardly ever happens must not have the journal read to its end.
with looked as materialized (
    select j.row_id, j.seq, j.at, j.move
    from durable.journal j
    where (cast(:id as uuid) is null or j.row_id = cast(:id as uuid))
      and (cast(:after as bigint) is null or j.seq < cast(:after as bigint))
    order by j.seq desc
    limit :looked_at
),
earliest as materialized (
    select case when cast(:since_seconds as float8) is null then cast('-infinity' as timestamptz)
        else durable.durable_now() - make_interval(secs => cast(:since_seconds as float8)) end as at
),
bounds as materialized (
    select count(*) as looked, min(l.seq) as last_seq,
        coalesce(min(l.at) >= (select e.at from earliest e), false) as last_is_within
    from looked l
),
page as materialized (
    select l.row_id, l.seq
    from looked l
    where l.at >= (select e.at from earliest e)
      and (cast(:move as text) is null or l.move = cast(:move as text))
    order by l.seq desc
    limit :limit
)
select b.looked, b.last_seq, b.last_is_within, j.seq, j.at, cast(j.row_id as text) as row_id, j.contract,
    coalesce(d.kind, o.kind) as kind, j.move,
    j.from_state, j.to_state, j.fence, j.attempt, coalesce(j.by_whom, j.owner) as by, j.reason, j.facts
from bounds b
left join page p on true
left join durable.journal j on j.row_id = p.row_id and j.seq = p.seq
left join durable.deliveries d on d.id = p.row_id
left join durable.operations o on o.id = p.row_id
order by j.seq desc
