-- name: an_event_is_stuck
-- A row where an event has waited for longer than its ingestion takes, or than its execution is alive, and no delivery
-- is on its way to it.
select
from durable.case_events e
where e.status = 'pending'
  and e.pending_at <= (select durable.durable_now()) - make_interval(secs => :stuck_seconds)
  and not exists (
      select
      from durable.deliveries d
      where d.kind = 'case-event' and d.key = cast(e.id as text) || ':' || e.tries
        and d.state in ('pending', 'processing'))
limit 1

-- name: take_stuck
-- before: pending for too long, no live claim of its own execution, and no delivery of its `tries` that has not ended:
--         whoever took it in, or up, is gone, or has lost the case
-- after:  pending under a higher `tries`, as of now; with the type of the case that it is for, none where it has no case
-- locks:  the events, those that somebody else has locked are left to them
with stuck as materialized (
    select e.id, c.case_type
    from durable.case_events e
    left join durable.case_correlations r on r.system = e.system and r.external_id = e.external_id
    left join durable.cases c on c.id = r.case_id
    where e.status = 'pending'
      and e.pending_at <= (select durable.durable_now()) - make_interval(secs => :stuck_seconds)
      -- A process that does not know the type leaves it to one that does.
      and (c.id is null or c.case_type in (select jsonb_array_elements_text(cast(:types as jsonb))))
      and not exists (
          select
          from durable.case_claims h
          where h.case_id = r.case_id and h.request_id = e.id and h.expires_at > (select durable.durable_now()))
      -- However long no worker comes to it: an event that nobody executed has spent nothing.
      and not exists (
          select
          from durable.deliveries d
          where d.kind = 'case-event' and d.key = cast(e.id as text) || ':' || e.tries
            and d.state in ('pending', 'processing'))
    order by e.pending_at
    limit :limit
    for no key update of e skip locked
)
update durable.case_events e
set tries = e.tries + 1, pending_at = durable.durable_now()
from stuck s
where e.id = s.id and e.status = 'pending'
returning cast(e.id as text) as id, e.tries, s.case_type, cast(e.event as text) as event
