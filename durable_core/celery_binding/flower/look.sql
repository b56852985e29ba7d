-- name: bound
-- before: a transaction that has read nothing yet
-- after:  it cannot write, and no statement of it runs longer than this; both end with the transaction
select set_config('transaction_read_only', 'on', true) as read_only,
    set_config('statement_timeout', cast(:milliseconds as text), true) as statement_timeout,
    -- By an index in its order, as far as there is one: of a table that was never analysed the planner expects few rows.
    set_config('enable_bitmapscan', 'off', true) as enable_bitmapscan,
    set_config('enable_seqscan', 'off', true) as enable_seqscan,
    set_config('jit', 'off', true) as jit
