-- The movable clock of a test database. Installed by `durable_core.testing` as the owner of the schema, never by
-- a migration: a production schema has no table to fake time with, and a runtime role may not replace the function.

-- name: install_table
create table if not exists durable.test_clock (
    only_one  boolean     primary key default true check (only_one),
    moved_by  interval    not null default '0',
    frozen_at timestamptz
)

-- name: install_row
insert into durable.test_clock default values on conflict do nothing

-- name: install_function
create or replace function durable.durable_now() returns timestamptz
    language sql volatile parallel safe
    as $$
        select coalesce(c.frozen_at, pg_catalog.clock_timestamp()) + c.moved_by from durable.test_clock c
    $$

-- name: uninstall_function
create or replace function durable.durable_now() returns timestamptz
    language sql volatile parallel safe
    as $$ select pg_catalog.clock_timestamp() $$

-- name: uninstall_table
drop table if exists durable.test_clock

-- name: move
update durable.test_clock set moved_by = moved_by + make_interval(secs => :seconds)

-- name: freeze
update durable.test_clock set frozen_at = pg_catalog.clock_timestamp()

-- name: reset
update durable.test_clock set moved_by = '0', frozen_at = null

-- name: now
select durable.durable_now() as now
