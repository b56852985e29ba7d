-- name: page
-- Newest first, without their states. With who is at them now.
select cast(c.id as text) as id, c.case_type, c.seq, c.ended_at, c.journal_count as entries, c.created_at, c.updated_at,
    h.step as claimed_step, h.scope_key as claimed_scope_key, h.expires_at as claimed_until
from durable.cases c
left join durable.case_claims h on h.case_id = c.id
where (cast(:case_type as text) is null or c.case_type = cast(:case_type as text))
  and (:dormant or c.ended_at is null)
  and (cast(:after as uuid) is null or c.id < cast(:after as uuid))
order by c.id desc
limit :limit

-- name: counts
-- How many are claimed and by leases that are over, how many events wait and are dead letters; counts stop at a limit.
select
    (select cast(count(*) as integer) from (
        select from durable.case_claims h limit :limit) as n) as claimed,
    (select cast(count(*) as integer) from (
        select from durable.case_claims h
        where h.expires_at <= (select durable.durable_now()) limit :limit) as n) as lapsed,
    (select cast(count(*) as integer) from (
        select from durable.case_events e where e.status = 'pending' limit :limit) as n) as pending_events,
    (select cast(count(*) as integer) from (
        select from durable.case_events e where e.status = 'dead-lettered' limit :limit) as n) as dead_letters

-- name: by_id
select 'case' as what, cast(c.id as text) as id, c.case_type as kind
from durable.cases c
where c.id = cast(:id as uuid)

-- name: by_beginning
-- Between the first and the last id that begin so; the newest first.
select 'case' as what, cast(c.id as text) as id, c.case_type as kind
from durable.cases c
where c.id >= cast(:first as uuid) and c.id <= cast(:last as uuid)
order by c.id desc
limit :most

-- name: by_execution
-- The case of an execution.
select 'case' as what, cast(c.id as text) as id, c.case_type as kind
from durable.cases c
where c.id in (select j.case_id from durable.case_journal j where j.execution_id = cast(:id as uuid))

-- name: by_event
-- The case of an event, by the event's id.
select 'case' as what, cast(c.id as text) as id, c.case_type as kind
from durable.case_events e
join durable.cases c on c.id = e.case_id
where e.id = cast(:id as uuid)

-- name: by_external_id
-- The cases that other systems know by this name: hop over the systems, and look for it in each.
with recursive hop (system) as (
    (select r.system from durable.case_correlations r order by r.system limit 1)
    union all
    select (select r.system from durable.case_correlations r where r.system > h.system order by r.system limit 1)
    from hop h
    where h.system is not null
)
select 'case' as what, cast(c.id as text) as id, c.case_type as kind
from hop h
join durable.case_correlations r on r.system = h.system and r.external_id = cast(:external_id as text)
join durable.cases c on c.id = r.case_id
order by c.id desc
limit :most
