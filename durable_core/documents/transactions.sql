-- The transaction of one request.

-- name: bound
-- before: the transaction has begun
-- after:  its statements wait no longer than this for a lock, until it ends
-- locks:  nothing
select set_config('lock_timeout', :lock_timeout, true) as set
