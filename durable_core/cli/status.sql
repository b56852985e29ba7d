-- name: lapsed
-- How long ago the oldest lease ended whose row no reap took back, a row that is locked meanwhile included.
-- Reads the rows that are being processed; null when all of them are leased.
select cast(extract(epoch from max(durable.durable_now() - d.lease_expires_at)) as float8) as seconds
from durable.deliveries d
where d.state = 'processing'
  and d.held_reason is null
  and d.lease_expires_at < (select durable.durable_now())
