-- name: bound
-- before: a transaction that has written nothing yet
-- after:  no statement of it runs longer than this, its waits for locks included; that ends with the transaction
select set_config('statement_timeout', cast(:milliseconds as text), true) as statement_timeout
