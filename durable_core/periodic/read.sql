-- name: schedules
-- All of them: as many as there are periodic kinds.
select s.kind, cast(s.id as text) as id, s.cron, s.timezone, s.missed, s.since, s.last_slot, s.next_slot,
    s.paused_at, s.paused_until, s.paused_by, s.paused_reason, s.skipped_from, s.skipped_to, s.skipped_at
from durable.schedules s
order by s.kind
