-- Emptying a test database: the host's own tables in it, and who is in the way.

-- name: host_tables
-- Those outside of our schema that no extension brought along.
select n.nspname as schema, c.relname as name
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p')
  and not c.relispartition
  and n.nspname <> 'information_schema'
  and n.nspname not like 'pg\_%'
  and n.nspname <> :durable
  and not exists (
    select from pg_depend e where e.classid = cast('pg_class' as regclass) and e.objid = c.oid and e.deptype = 'e')
order by n.nspname, c.relname

-- name: end_left_open
-- Ends the backends of this database that idle within a transaction; what each said last.
select a.pid, a.query, pg_terminate_backend(a.pid, 5000) as ended
from pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.state like 'idle in transaction%'
