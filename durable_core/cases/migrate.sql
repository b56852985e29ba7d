-- name: waiting
-- The next cases of a type that a migration has not marked, by id. Its mark is the completed entry of its step.
select cast(c.id as text) as id
from durable.cases c
where c.case_type = :case_type
  and (cast(:after as uuid) is null or c.id > cast(:after as uuid))
  and (:ended or c.ended_at is null)
  and not exists (
      select
      from durable.case_journal j
      where j.case_id = c.id and j.step = :step and j.entry = 'completed')
order by c.id
limit :limit

-- name: waiting_among
-- The same of these cases. A statement of its own: with the choice in it, all cases of the type would be read.
select cast(c.id as text) as id
from unnest(cast(:ids as uuid[])) as wanted (id)
join durable.cases c on c.id = wanted.id
where c.case_type = :case_type
  and (cast(:after as uuid) is null or c.id > cast(:after as uuid))
  and (:ended or c.ended_at is null)
  and not exists (
      select
      from durable.case_journal j
      where j.case_id = c.id and j.step = :step and j.entry = 'completed')
order by c.id
limit :limit
