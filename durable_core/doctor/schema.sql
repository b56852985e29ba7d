-- name: objects
-- What our schema holds of these tables and functions, or of all where none are named, by the catalog alone: one line an
-- object, defined as text in which every name is qualified. Catalogs need no right on what they describe.
with bound as materialized (
    select set_config('search_path', 'pg_catalog', true) as qualified
),
ours as materialized (
    select n.oid, n.nspname, quote_ident(n.nspname) as quoted
    from bound b, pg_namespace n
    where n.nspname = :schema
),
tables as materialized (
    select c.oid, c.relname, c.relkind, c.relpersistence, c.relrowsecurity, c.relforcerowsecurity, c.reloptions
    from ours o
    join pg_class c on c.relnamespace = o.oid
    where c.relkind in ('r', 'p', 'v', 'm', 'f')
      and (cast(:tables as text[]) is null or c.relname = any(cast(:tables as text[])))
)
select 'table' as what, cast(t.relname as text) as name,
    concat_ws(' ', t.relkind, t.relpersistence,
        case when t.relrowsecurity or t.relforcerowsecurity then 'row level security' end) as definition,
    cast(null as text) as fault
from tables t
union all
select 'options', t.relname, coalesce((select string_agg(o, ', ' order by o) from unnest(t.reloptions) o), ''), null
from tables t
where t.relkind in ('r', 'p')
union all
select 'column', concat(t.relname, '.', a.attname),
    concat_ws(' ', format_type(a.atttypid, a.atttypmod),
        case when a.attnotnull then 'not null' end,
        case when a.attidentity <> '' then concat('identity ', a.attidentity) end,
        case when a.attgenerated <> '' then 'generated' end,
        'default ' || pg_get_expr(d.adbin, d.adrelid)),
    null
from tables t
join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped
left join pg_attrdef d on d.adrelid = t.oid and d.adnum = a.attnum
union all
select 'index', i.relname, pg_get_indexdef(x.indexrelid),
    case when not (x.indisvalid and x.indisready and x.indislive) then 'invalid' end
from tables t
join pg_index x on x.indrelid = t.oid
join pg_class i on i.oid = x.indexrelid
union all
select 'constraint', concat(t.relname, '.', c.conname), pg_get_constraintdef(c.oid), null
from tables t
join pg_constraint c on c.conrelid = t.oid
-- From 18 on NOT NULL is a constraint with a name as well; the columns tell it in every release.
where c.contype in ('c', 'p', 'u', 'f', 'x')
union all
select 'function', concat(p.proname, '(', pg_get_function_identity_arguments(p.oid), ')'),
    concat_ws(' ', 'returns', pg_get_function_result(p.oid), l.lanname, p.provolatile, p.proparallel, p.prokind,
        case when p.prosecdef then 'security definer' end,
        case when p.proisstrict then 'strict' end,
        array_to_string(p.proconfig, ' '),
        coalesce(pg_get_function_sqlbody(p.oid), p.prosrc)),
    null
from ours o
join pg_proc p on p.pronamespace = o.oid
join pg_language l on l.oid = p.prolang
where cast(:functions as text[]) is null or p.proname = any(cast(:functions as text[]))
union all
select 'trigger', concat(t.relname, '.', g.tgname), pg_get_triggerdef(g.oid),
    case when g.tgenabled not in ('O', 'A') then 'disabled' end
from tables t
join pg_trigger g on g.tgrelid = t.oid and not g.tgisinternal
order by 1, 2

-- name: about
select current_setting('server_version_num') as version, quote_ident(:schema) as quoted
