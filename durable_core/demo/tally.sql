-- What the tally counts: rows as they are, never what anybody believes.

-- name: orders
select o.number, cast(o.email_delivery as text) as email, cast(o.webhook_delivery as text) as webhook
from shop.orders o

-- name: deliveries
-- xmin is the transaction that wrote the row last: for a sent one the commit of its receipt.
select cast(d.id as text) as id, d.kind, d.state, d.fence, d.settled_fence, cast(cast(d.xmin as text) as bigint) as xid,
    d.error_code
from durable.deliveries d

-- name: effects
-- A transaction's full number, cut to the 32 bits that xmin has.
select cast(e.delivery_id as text) as delivery_id, e.fence,
    cast(mod(cast(cast(e.xid as text) as numeric), 4294967296) as bigint) as xid
from shop.effects e

-- name: journal
select cast(j.row_id as text) as row_id, j.move, j.to_state from durable.journal j where j.contract = 'delivery'

-- name: progress
select count(*) filter (where d.state = 'sent') as sent,
    count(*) filter (where d.state in ('pending', 'processing')) as open
from durable.deliveries d

-- name: unfinished
select d.state, d.kind, d.error_code, count(*) as rows
from durable.deliveries d
where d.state in ('pending', 'processing')
group by d.state, d.kind, d.error_code
order by rows desc
limit 5
