-- name: compensable
-- before: the caller's transaction is open
-- after:  locked, so that two do not compensate one plan at once
-- locks:  the row, unless somebody has it: then `locked` is false
with locked as materialized (
    select p.id
    from durable.plans p
    where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
    for no key update skip locked
)
select p.state, l.id is not null as locked,
    (
        select cast(c.id as text)
        from durable.plans c
        where c.compensates = p.id
          and (c.state in ('pending', 'approved', 'executing', 'executed')
              -- What it did before it failed would be done a second time.
              or exists (select from durable.plan_receipts r where r.plan_id = c.id and r.outcome = 'ok'))
        order by c.id
        limit 1
    ) as compensated_by
from durable.plans p
left join locked l on l.id = p.id
where p.id = cast(:id as uuid) and (cast(:origin as text) is null or p.origin = cast(:origin as text))
