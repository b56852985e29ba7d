-- name: bound
-- before: a transaction that has read nothing yet
-- after:  it cannot write, and no statement of it runs longer than this; both end with the transaction
select set_config('transaction_read_only', 'on', true) as read_only,
    set_config('statement_timeout', cast(:milliseconds as text), true) as statement_timeout
