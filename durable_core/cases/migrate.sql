-- name: waiting
-- The next cases of a type that a migration has not marked, by id. Its mark is the completed entry of its step.
select cast(c.id as text) as id
from durable.cases c
where c.case_type = :case_type
  and (cast(:after as uuid) is null or c.id > cast(:after as uuid))
  and (:ended or c.ended_at is null)
  and (cast(:ids as jsonb) is null
       or c.id in (select cast(i as uuid) from jsonb_array_elements_text(cast(:ids as jsonb)) as i))
  and not exists (
      select
      from durable.case_journal j
      where j.case_id = c.id and j.step = :step and j.entry = 'completed')
order by c.id
limit :limit
