-- name: pause
-- before: paused or not
-- after:  paused from now on; the pause before, if any, is ended and stays as history; no row back where another pause
--         of the same has just been committed, which the next statement sees
-- locks:  the pause in force; one that another open transaction writes is waited for
with ended as (
    update durable.pauses p
    set ended_at = durable.durable_now(),
        ended_by = :by
    where p.what = :what and p.name = :name and p.ended_at is null
    returning p.id
)
insert into durable.pauses (what, name, by_whom, reason, until)
select cast(:what as text), cast(:name as text), cast(:by as text), cast(:reason as text), cast(:until as timestamptz)
from (select count(*) from ended) as after_the_end
on conflict (what, name) where ended_at is null do nothing
returning what, name, by_whom as by, reason, since, until

-- name: resume
-- before: paused
-- after:  not paused; what waits is looked at by the next dispatch
-- locks:  the pause in force
update durable.pauses p
set ended_at = durable.durable_now(),
    ended_by = :by
where p.what = :what and p.name = :name and p.ended_at is null
returning p.until is null or p.until > durable.durable_now() as was_in_force

-- name: pauses
select p.what, p.name, p.by_whom as by, p.reason, p.since, p.until
from durable.pauses p
where p.ended_at is null and (p.until is null or p.until > (select durable.durable_now()))
order by p.since
