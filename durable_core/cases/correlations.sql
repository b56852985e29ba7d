-- name: of_case
-- What other systems call a case and its elements, oldest first; the metadata as text.
select cast(c.id as text) as id, c.system, c.external_id, cast(c.case_id as text) as case_id, c.scope_key, c.step,
    cast(c.metadata as text) as metadata, c.created_at, c.updated_at
from durable.case_correlations c
where c.case_id = cast(:case_id as uuid)
  and (cast(:after as uuid) is null or c.id > cast(:after as uuid))
order by c.id
limit :limit
