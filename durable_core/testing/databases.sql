-- The host's own tables in a test database.

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
