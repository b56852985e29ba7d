-- What the nemesis looks at. It writes nothing: its tools are signals and FLUSHALL.

-- name: victims
-- Rows whose handler runs now, the latest claims first; none that lost a worker before, for from the second
-- time on the rescue waits half a minute.
select cast(d.id as text) as id, d.fence, d.owner_pid
from durable.deliveries d
where d.state = 'processing' and d.interruptions = 0
order by d.claimed_at desc
limit 20

-- name: still_inside
-- The row if its owner still holds it and is not in the middle of its commit, which a lock would show.
select d.fence
from durable.deliveries d
where d.id = cast(:id as uuid) and d.state = 'processing' and d.fence = :fence
for no key update skip locked

-- name: row
select d.fence, d.settled_fence = d.fence as settled from durable.deliveries d where d.id = cast(:id as uuid)

-- name: refused
-- The line that a refused owner leaves under its own fence.
select exists (
    select from durable.journal j where j.row_id = cast(:id as uuid) and j.move = 'refused' and j.fence = :fence
) as here
