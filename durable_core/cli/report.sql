-- name: server
-- What the server is, and what an operator of it may have set that matters to us.
select current_setting('server_version') as version, pg_is_in_recovery() as is_replica,
    current_setting('synchronous_commit') as synchronous_commit, current_setting('fsync') as fsync,
    current_setting('default_transaction_isolation') as isolation
