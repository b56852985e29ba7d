-- Looks at the server and at our place in it. They need no right but to connect.

-- name: server
select current_setting('server_version') as version,
    cast(current_setting('server_version_num') as integer) as number,
    pg_is_in_recovery() as recovering,
    current_setting('default_transaction_read_only') as read_only,
    current_setting('synchronous_commit') as synchronous_commit,
    current_setting('fsync') as fsync,
    current_setting('session_replication_role') as replication_role,
    current_setting('autovacuum') as autovacuum,
    quote_ident(current_user) as role

-- name: role
select cast(current_user as text) as name,
    quote_ident(current_user) as quoted,
    r.rolsuper as superuser,
    -- A superuser has every role; of others those count whose rights they have without a word.
    (select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where n.nspname = :schema and c.relkind in ('r', 'p') and c.relname = any(cast(:tables as text[]))
       and pg_has_role(current_user, c.relowner, 'usage')
    ) as owns
from pg_roles r
where r.rolname = current_user

-- name: lacks
-- The rights on what is ours that the application's role needs and this one has not; `fix` gives it them. Tables of the
-- host in the same schema are none of our business.
with tables as (
    select n.nspname as schema, c.relname as name, string_agg(p.wanted, ', ' order by p.place) as rights
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    cross join unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) with ordinality as p (wanted, place)
    where n.nspname = :schema
      and c.relkind in ('r', 'p')
      and c.relname = any(cast(:tables as text[]))
      and (p.wanted = 'SELECT' or c.relname <> 'schema_version')
      and not has_table_privilege(c.oid, p.wanted)
    group by n.nspname, c.relname
)
select concat('USAGE on schema ', n.nspname) as what,
    format('grant usage on schema %I to %I', n.nspname, current_user) as fix
from pg_namespace n
where n.nspname = :schema and not has_schema_privilege(n.oid, 'USAGE')
union all
select concat(t.rights, ' on ', string_agg(t.name, ', ' order by t.name)),
    format('grant %s on %s to %I',
        lower(t.rights), string_agg(format('%I.%I', t.schema, t.name), ', ' order by t.name), current_user)
from tables t
group by t.rights
union all
select concat('EXECUTE on ', f.proname),
    format('grant execute on function %I.%I(%s) to %I',
        n.nspname, f.proname, pg_get_function_identity_arguments(f.oid), current_user)
from pg_proc f
join pg_namespace n on n.oid = f.pronamespace
where n.nspname = :schema
  and f.proname = any(cast(:functions as text[]))
  and f.prorettype <> cast('trigger' as regtype)
  and not has_function_privilege(f.oid, 'EXECUTE')
order by 1

-- name: clock
select durable.durable_now() as now

-- name: sessions
-- Those of this database that hold a transaction open so long, the oldest first; `hidden` counts sessions of other roles
-- that hide when theirs began.
with others as materialized (
    select a.pid, cast(a.usename as text) as role, a.application_name as program, a.state, a.xact_start, a.state_change,
        a.backend_xmin is not null or a.backend_xid is not null as open
    from pg_stat_activity a
    where a.datname = current_database() and a.pid <> pg_backend_pid()
      -- Of sessions of other roles that, too, is hidden; whether they are in a transaction is not.
      and coalesce(a.backend_type, 'client backend') = 'client backend'
)
select o.pid, o.role, o.program, o.state,
    cast(extract(epoch from r.now - o.xact_start) as float8) as seconds,
    (select count(*) from others h where h.state is null and h.open) as hidden
from (select durable.durable_now() as now) as r
left join others o on o.state <> 'idle' and o.xact_start < r.now - make_interval(secs => :older_seconds)
order by o.xact_start
limit :most

-- name: prepared
select p.gid, quote_literal(p.gid) as quoted, p.owner as role, cast(extract(epoch from durable.durable_now() - p.prepared) as float8) as seconds
from pg_prepared_xacts p
where p.database = current_database()
  and p.prepared < (select durable.durable_now()) - make_interval(secs => :older_seconds)
order by p.prepared
limit :most

-- name: vacuum
select s.relname as table, s.n_live_tup as live, s.n_dead_tup as dead, s.last_autovacuum as at
from pg_stat_user_tables s
where s.schemaname = :schema and s.relname = any(cast(:tables as text[]))
  and s.n_dead_tup > greatest(s.n_live_tup, :least)
order by s.relname
