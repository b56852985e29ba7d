-- name: sent_by
-- The context in which a row was enqueued, and its queue.
select d.queue, d.trace from durable.deliveries d where d.id = cast(:id as uuid)
