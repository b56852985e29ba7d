-- name: bound
-- before: a transaction that has read nothing yet
-- after:  it cannot write, no statement of it runs longer than this, its waits for locks included, and each goes by an
--         index in its order, as far as there is one; all of it ends with the transaction
select set_config('transaction_read_only', 'on', true) as read_only,
    set_config('statement_timeout', cast(:milliseconds as text), true) as statement_timeout,
    -- A look takes the first few thousand of an index. The planner would rather read all that match and sort them: of a
    -- table that was never analysed it expects few, and of one that was it trusts the disk to be quick.
    set_config('enable_bitmapscan', 'off', true) as enable_bitmapscan,
    set_config('enable_seqscan', 'off', true) as enable_seqscan,
    set_config('enable_sort', 'off', true) as enable_sort,
    -- What has no index costs a fortune by that, and is not worth compiling.
    set_config('jit', 'off', true) as jit
