-- name: read
select n.* from (
    select j.seq, j.at, j.move, j.from_state, j.to_state, j.fence, j.attempt,
        coalesce(j.by_whom, j.owner) as by, j.reason, j.facts
    from durable.journal j
    where j.row_id = cast(:id as uuid)
    order by j.seq desc
    limit :limit
) as n
order by n.seq
