-- Who waits for whom, for tests that need two connections to really block.

-- name: blockers
-- The backends that this one waits for; none while it runs or is idle.
select unnest(pg_blocking_pids(:pid)) as pid

-- name: waiting
-- The backends of this database that wait for a lock somebody holds.
select a.pid
from pg_stat_activity a
where a.datname = current_database() and cardinality(pg_blocking_pids(a.pid)) > 0
