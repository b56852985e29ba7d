-- name: begin
-- before: this sweep began longer ago than its rest, by the database's clock, or never
-- after:  it has begun now; no row back means another just did, and this one is to return at once. `idle`: there is
--         nothing to do by the sweep's own look, put in the place of 'look', and it has ended too
-- locks:  the sweep's line
with clock as materialized (
    select durable.durable_now() as now,
        -- The book does not wait for a standby: with that gone, sweeps would wait in every slot of a worker.
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated,
        -- A look waits no longer for the table, nor anybody for this line: else each message of a sweep would keep a
        -- slot of a worker, as long as somebody has the table locked.
        set_config('lock_timeout', :lock_timeout, true) as bounded
),
work as materialized (
    select exists (
        select 'look'
    ) as waits
),
begun as (
    insert into durable.loops as l (name, began_at, host)
    select :name, clock.now, :host from clock
    on conflict (name) do update
    set began_at = excluded.began_at,
        host = excluded.host,
        ended_at = case when (select w.waits from work w) then l.ended_at else excluded.began_at end,
        moved = case when (select w.waits from work w) then l.moved else 0 end,
        error = case when (select w.waits from work w) then l.error end,
        -- After a gap longer than a lease, or a server that came back meanwhile, every lease may be over
        -- although every worker lives: wait for one heartbeat before anything is taken from its owner.
        hold_until = case
            -- After a clock set back the instant to wait for may lie hours ahead; the leases live longer by as much.
            when l.began_at > excluded.began_at then null
            when (excluded.began_at - l.began_at > make_interval(secs => :lease_seconds)
                    -- But not twice in a row: a reap that always comes less often than once a lease would else
                    -- never take anything, and a worker without beat may come that seldom.
                    and not coalesce(l.hold_until > l.began_at, false))
                -- What stopped the run before, or held it up, may have done the same to their beats: a lock on the table.
                or l.error is not null
                or coalesce(l.ended_at - l.began_at not between interval '0'
                    and make_interval(secs => :heartbeat_seconds), true)
                or (pg_postmaster_start_time() > l.began_at
                    -- A clock set back makes every start look new until it has caught up.
                    and pg_postmaster_start_time() <= excluded.began_at)
            then excluded.began_at + make_interval(secs => :heartbeat_seconds)
            else l.hold_until
        end
    where l.began_at <= excluded.began_at - make_interval(secs => :rest_seconds)
        -- One that still runs is left to run: two dispatches at once would each fill the same gap.
        -- One that never ends was killed, and is waited for no longer than this.
        and (l.ended_at >= l.began_at
            or l.began_at <= excluded.began_at - make_interval(secs => :patience_seconds)
            -- The server came back since: whatever ran then has ended with it.
            or (pg_postmaster_start_time() > l.began_at and pg_postmaster_start_time() <= excluded.began_at))
        -- A clock set back must not stop the sweeps until it has caught up.
        or l.began_at > excluded.began_at
    returning l.began_at, l.hold_until, l.ended_at
)
select b.began_at, coalesce(b.hold_until > b.began_at, false) as held_back,
    coalesce(b.ended_at = b.began_at, false) and not (select w.waits from work w) as idle
from begun b

-- name: end
-- before: the run that began at this instant is over; one that began since, taking it for killed, is left alone
-- after:  its line says what it moved, or its error
-- locks:  the sweep's line
update durable.loops l
set ended_at = book.now, moved = :moved, error = :error
from (
    select durable.durable_now() as now,
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'off' else 'local' end, true) as unreplicated
) as book
where l.name = :name and l.began_at = :began_at

-- name: late
-- The sweeps that began longer ago than they may, or never; or as far ahead, as a clock set back leaves them.
select a.name
from jsonb_to_recordset(cast(:allowed as jsonb)) as a (name text, seconds float8)
left join durable.loops l on l.name = a.name
where l.began_at is null
   or durable.durable_now() - l.began_at
        not between make_interval(secs => -a.seconds) and make_interval(secs => a.seconds)

-- name: read
select l.name, l.began_at, l.ended_at, l.moved, l.error, l.host,
    cast(extract(epoch from durable.durable_now() - l.began_at) as float8) as age_seconds
from durable.loops l
order by l.name

-- name: due
-- A row where dispatch has something to hint, of whatever contract.
select from durable.due_queues()
union all
select where durable.a_plan_is_due()
union all
select where durable.an_operation_is_due()

-- name: lapsed
-- A row where some owner's lease is over, or some plan or operation was left alone for too long.
select where durable.a_lease_is_over()
union all
select where durable.a_plan_is_abandoned()
union all
select where durable.an_operation_is_abandoned()

-- name: polls
-- A row where an operation is due, to be issued or polled, or one was canceled lately.
select where durable.an_operation_is_due()
union all
select where durable.an_operation_was_canceled()

-- name: overdue
-- A row where the time of something to be useful is over.
select where durable.one_is_overdue()
union all
select where durable.a_plan_is_overdue()
union all
select where durable.an_operation_is_overdue()
