-- The example shop: its own schema and tables beside the durable ones.

-- name: drop_shop
drop schema if exists shop cascade

-- name: create_shop
create schema shop

-- name: create_orders
create table shop.orders (
    number           integer     primary key,
    customer         text        not null,
    email_delivery   uuid        not null,
    webhook_delivery uuid        not null,
    placed_at        timestamptz not null default pg_catalog.clock_timestamp()
)

-- name: create_effects
-- No unique constraint, on purpose: if an effect could be doubled, here it would show.
create table shop.effects (
    id           bigint generated always as identity primary key,
    delivery_id  uuid    not null,
    fence        bigint  not null,
    channel      text    not null,
    order_number integer not null,
    xid          xid8    not null default pg_catalog.pg_current_xact_id()
)

-- name: order
insert into shop.orders (number, customer, email_delivery, webhook_delivery)
values (:number, :customer, cast(:email_delivery as uuid), cast(:webhook_delivery as uuid))

-- name: effect
-- Written in the transaction that ends the attempt, by its owner.
insert into shop.effects (delivery_id, fence, channel, order_number)
values (cast(:delivery_id as uuid), :fence, :channel, :order_number)

-- name: is_durable
select to_regclass('durable.deliveries') is not null as here

-- name: strangers
-- Deliveries that no demo made: where there is one, this database is in use.
select count(*) as here from (
    select from durable.deliveries d where d.kind <> all (cast(:kinds as text[])) limit 1
) as stranger

-- name: leftovers
select exists (select from durable.deliveries) as here

