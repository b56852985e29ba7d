-- Ending a delivery by a legal move, for tests that need a row in that state and not the way to it.

-- name: end
-- before: pending or processing
-- after:  in the state asked for, by a move that the guards allow; its fence raised where that move raises it
-- locks:  the row
update durable.deliveries d
set state = cast(:state as text),
    fence = d.fence + cast(:raised as integer),
    settled_fence = d.fence + cast(:raised as integer),
    error_code = cast(:error_code as text),
    error_message = cast(:error_code as text),
    owner = null,
    lease_expires_at = null,
    deadline_at = null,
    finished_at = durable.durable_now()
where d.id = cast(:id as uuid)
returning d.id

-- name: past_the_guards
-- For the rest of the transaction no trigger fires. The superuser's alone.
select set_config('session_replication_role', 'replica', true) as session_replication_role

-- name: withdraw
-- before: pending
-- after:  gone, unless somebody is claiming it just now
-- locks:  the rows, skipping what others hold
delete from durable.deliveries d
where d.id in (select p.id from durable.deliveries p where p.state = 'pending' for update skip locked)

-- name: running
select cast(d.id as text) as id from durable.deliveries d where d.state = 'processing' limit 1
