-- The shop's products, which the plan of the demo changes.

-- name: create_products
create table shop.products (
    name    text   primary key,
    cents   integer not null,
    version bigint  not null default 1
)

-- name: stock
-- after:  the products as they are before any plan
insert into shop.products (name, cents)
values ('ash', 1000), ('elm', 2000), ('oak', 3000)

-- name: version
-- locks:  the product, so that it is as it was reviewed until the step has ended
select p.version from shop.products p where p.name = :name for update

-- name: reprice
-- after:  the product has this price and a version one higher
update shop.products p
set cents = :cents, version = p.version + 1
from (select o.name, o.cents from shop.products o where o.name = :name for update) as old
where p.name = old.name
returning old.cents as before, p.version

-- name: remove
delete from shop.products p where p.name = :name

-- name: prices
select p.name, p.cents from shop.products p order by p.name
