-- Cases on Postgres, in the order of the life cycle. Whoever writes to a case has locked its row before, in a statement of
-- its own: what is looked at under the lock is looked at in the next one, for a statement that waited for a lock has
-- an old look at all other tables.

-- name: insert
-- after: a new case, with seq 0 and an empty journal
insert into durable.cases (id, case_type, state, created_at, updated_at)
select cast(:id as uuid), cast(:case_type as text), cast(:state as jsonb), c.now, c.now
from (select durable.durable_now() as now) c
returning cast(id as text) as id, case_type, cast(state as text) as state, seq, ended_at, journal_count, journal_head,
    created_at, updated_at

-- name: case_of
-- A case as this transaction sees it.
select cast(c.id as text) as id, c.case_type, cast(c.state as text) as state, c.seq, c.ended_at, c.journal_count,
    c.journal_head, c.created_at, c.updated_at
from durable.cases c
where c.id = cast(:id as uuid)

-- name: claim_of
-- The claim on a case, live or lapsed.
select cast(k.case_id as text) as case_id, cast(k.execution_id as text) as execution_id, k.step, k.scope_key,
    cast(k.request_id as text) as request_id, k.attempt, k.claimed_at, k.heartbeat_at, k.expires_at
from durable.case_claims k
where k.case_id = cast(:id as uuid)

-- name: lock
-- before: a transaction of ours or the caller's
-- after:  nobody else writes to the case until it ends; no lock is waited for longer than it is told
-- locks:  the case row, before anything else of the case; it comes back as it is once the lock is granted
with bound as materialized (
    select current_setting('lock_timeout') as was, set_config('lock_timeout', :lock_timeout, true) as set
)
select cast(c.id as text) as id, c.case_type, cast(c.state as text) as state, c.seq, c.ended_at, c.journal_count,
    c.journal_head, c.created_at, c.updated_at, cast(pg_current_xact_id() as text) as xid, b.was as lock_timeout_was
from bound b, durable.cases c
where c.id = cast(:id as uuid)
for no key update of c

-- name: unbound
-- after: the session's own bound on locks again
select set_config('lock_timeout', :was, true) as set

-- name: look
-- What is so under the lock of the case: the claim, whether its lease is over, and the database's instant.
-- locks: the claim, only where its lease looks over: then a beat that comes now is skipped, and one under way is waited
--        for and judged as it left the claim, so no lease that was just renewed is taken. While it lasts nobody but
--        its owner has business with it, and beats are not to be skipped for those who only ask.
with seen as materialized (
    select k.case_id, k.execution_id, k.step, k.scope_key, k.request_id, k.attempt, k.claimed_at, k.heartbeat_at,
        k.expires_at, k.expires_at <= (select durable.durable_now()) as looks_over
    from durable.case_claims k
    where k.case_id = cast(:id as uuid)
),
locked as materialized (
    select k.case_id, k.execution_id, k.step, k.scope_key, k.request_id, k.attempt, k.claimed_at, k.heartbeat_at,
        k.expires_at
    from durable.case_claims k
    where k.case_id = cast(:id as uuid) and (select s.looks_over from seen s)
    for no key update of k
),
-- Read once the claim is locked: the lease is judged by it.
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as held
),
found as (
    select l.*, l.expires_at <= clock.now as lapsed from locked l, clock
    union all
    select s.case_id, s.execution_id, s.step, s.scope_key, s.request_id, s.attempt, s.claimed_at, s.heartbeat_at,
        s.expires_at, false as lapsed
    from seen s
    where not s.looks_over
)
select clock.now, coalesce(f.lapsed, false) as lapsed,
    cast(f.case_id as text) as case_id, cast(f.execution_id as text) as execution_id, f.step, f.scope_key,
    cast(f.request_id as text) as request_id, f.attempt, f.claimed_at, f.heartbeat_at, f.expires_at,
    (
        select j.number from durable.case_journal j
        where j.request_id = cast(:request_id as uuid) and j.entry = 'completed' and j.case_id = cast(:id as uuid)
    ) as answered
from clock
left join found f on true

-- name: lapse
-- before: the case is locked, and its claim was looked at under the lock: its lease is over
-- after:  the claim is gone, the entry that says so is appended
-- locks:  the case row, held already; the claim
with entry as (
    insert into durable.case_journal (
        case_id, number, id, execution_id, request_id, entry, attempt, step, scope_key, error, salt, payload_digest,
        digest, chain, keyed, recorded_at)
    values (
        cast(:case_id as uuid), :number, cast(:id as uuid), cast(:execution_id as uuid), cast(:request_id as uuid),
        :entry, :attempt, :step, cast(:scope_key as text), cast(:error as json), :salt, :payload_digest, :digest,
        :chain, :keyed, :recorded_at)
    returning case_id, number, chain, execution_id
),
headed as (
    update durable.cases c
    set journal_count = e.number, journal_head = e.chain
    from entry e
    where c.id = e.case_id
)
delete from durable.case_claims k
using entry e
where k.case_id = e.case_id and k.execution_id = e.execution_id

-- name: take
-- before: the case is locked, and no claim is on it
-- after:  it is claimed under this execution, for a lease from now by the database's clock; the entry is appended
-- locks:  the case row, held already
with entry as (
    insert into durable.case_journal (
        case_id, number, id, execution_id, request_id, entry, attempt, step, scope_key, as_of, actor, input, guard,
        state, salt, payload_digest, digest, chain, keyed, recorded_at)
    values (
        cast(:case_id as uuid), :number, cast(:id as uuid), cast(:execution_id as uuid), cast(:request_id as uuid),
        :entry, :attempt, :step, cast(:scope_key as text), :as_of, cast(:actor as json), cast(:input as json),
        cast(:guard as json), cast(:state as json), :salt, :payload_digest, :digest, :chain, :keyed, :recorded_at)
    returning case_id, number, chain, execution_id, request_id, step, scope_key
),
headed as (
    update durable.cases c
    set journal_count = e.number, journal_head = e.chain
    from entry e
    where c.id = e.case_id
)
insert into durable.case_claims (
    case_id, execution_id, step, scope_key, request_id, claimed_at, heartbeat_at, expires_at)
select e.case_id, e.execution_id, e.step, e.scope_key, e.request_id, clock.now, clock.now,
    clock.now + make_interval(secs => :lease_seconds)
from entry e, (select durable.durable_now() as now) clock
returning cast(case_id as text) as case_id, cast(execution_id as text) as execution_id, step, scope_key,
    cast(request_id as text) as request_id, attempt, claimed_at, heartbeat_at, expires_at

-- name: keep
-- before: the claim is this execution's
-- after:  its lease lasts so long from now; no row back: somebody else has the case, or it settled
-- locks:  the claim, skipping it when it is being settled
with mine as materialized (
    select k.case_id
    from durable.case_claims k
    where k.case_id = cast(:case_id as uuid) and k.execution_id = cast(:execution_id as uuid)
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from mine
),
kept as (
    update durable.case_claims k
    set heartbeat_at = clock.now,
        expires_at = greatest(k.expires_at, clock.now + make_interval(secs => :lease_seconds))
    from mine m, clock
    where k.case_id = m.case_id
)
select exists (
    select from durable.case_claims k
    where k.case_id = cast(:case_id as uuid) and k.execution_id = cast(:execution_id as uuid)
) as still_mine

-- name: append
-- before: the case is locked
-- after:  the entry is appended; where its execution holds the claim still, the next attempt is counted or the claim gone
-- locks:  the case row, held already; the claim
with entry as (
    insert into durable.case_journal (
        case_id, number, id, execution_id, request_id, entry, attempt, step, scope_key, actor, error, salt,
        payload_digest, digest, chain, keyed, recorded_at)
    values (
        cast(:case_id as uuid), :number, cast(:id as uuid), cast(:execution_id as uuid), cast(:request_id as uuid),
        :entry, :attempt, :step, cast(:scope_key as text), cast(:actor as json), cast(:error as json), :salt,
        :payload_digest, :digest, :chain, :keyed, :recorded_at)
    returning case_id, number, chain, execution_id
),
headed as (
    update durable.cases c
    set journal_count = e.number, journal_head = e.chain
    from entry e
    where c.id = e.case_id
),
counted as (
    update durable.case_claims k
    set attempt = cast(:next_attempt as integer)
    from entry e
    where k.case_id = e.case_id and k.execution_id = e.execution_id and cast(:next_attempt as integer) is not null
)
delete from durable.case_claims k
using entry e
where k.case_id = e.case_id and k.execution_id = e.execution_id and cast(:release as boolean)

-- name: write_state
-- before: the case is locked, its claim looked at under the lock: it is this execution's
-- after:  the case is as the commit makes it, for the writes of user code to see; `settle` follows
-- locks:  the case row, held already
update durable.cases c
set state = cast(:state as jsonb), seq = :seq, ended_at = cast(:ended_at as timestamptz), updated_at = :at
where c.id = cast(:case_id as uuid)

-- name: settle
-- before: locked by `lock` in this very transaction; the claim looked at under the lock: it is this execution's
-- after:  the case is as the commit makes it, if it was not written before; `completed` is appended, the claim gone
-- locks:  the case row, held already; the claim
-- A division by zero ends the transaction when there was nothing to settle: a state never commits without its entry.
with entry as (
    insert into durable.case_journal (
        case_id, number, id, execution_id, request_id, entry, attempt, step, scope_key, seq, dormancy, actor, delta,
        salt, payload_digest, digest, chain, keyed, recorded_at)
    select
        k.case_id, :number, cast(:id as uuid), k.execution_id, cast(:request_id as uuid),
        :entry, :attempt, :step, cast(:scope_key as text), cast(:entry_seq as bigint), cast(:dormancy as text),
        cast(:actor as json), cast(:delta as json), :salt, :payload_digest, :digest, :chain, :keyed, :recorded_at
    from durable.case_claims k
    where k.case_id = cast(:case_id as uuid) and k.execution_id = cast(:execution_id as uuid)
      and cast(pg_current_xact_id() as text) = :xid
    returning case_id, number, chain, execution_id
),
-- The guard of the case asks for the claim and for the entry: the one goes last, the other comes first.
written as (
    update durable.cases c
    set journal_count = e.number, journal_head = e.chain,
        state = case when cast(:writes as boolean) then cast(:state as jsonb) else c.state end,
        seq = case when cast(:writes as boolean) then cast(:seq as bigint) else c.seq end,
        ended_at = case when cast(:writes as boolean) then cast(:ended_at as timestamptz) else c.ended_at end,
        updated_at = case when cast(:writes as boolean) then cast(:at as timestamptz) else c.updated_at end
    from entry e
    where c.id = e.case_id
    returning c.id, e.execution_id
),
released as (
    delete from durable.case_claims k
    using written w
    where k.case_id = w.id and k.execution_id = w.execution_id
    returning k.case_id
)
select 1 / count(*) as settled from released

-- name: dormant_since
-- Since when the case was dormant once this entry was written: the first `ended` behind the last `reopened`.
select min(j.recorded_at) as since
from durable.case_journal j
where j.case_id = cast(:case_id as uuid) and j.dormancy = 'ended' and j.number <= :number
  and j.number > coalesce((
      select max(r.number)
      from durable.case_journal r
      where r.case_id = cast(:case_id as uuid) and r.dormancy = 'reopened' and r.number <= :number
  ), 0)

-- name: written
-- Whether an entry of this id is in a journal.
select exists (select from durable.case_journal j where j.id = cast(:id as uuid)) as written

-- name: numbers
-- The numbers of a case's entries, in their order.
select j.number
from durable.case_journal j
where j.case_id = cast(:case_id as uuid) and j.number > :after
  and (cast(:kinds as text[]) is null or j.entry = any(cast(:kinds as text[])))
order by j.number
limit :limit

-- name: numbers_of_step
-- Those of one step, and of one scope key where one is named.
select j.number
from durable.case_journal j
where j.case_id = cast(:case_id as uuid) and j.step = cast(:step as text) and j.number > :after
  and (cast(:scope_key as text) is null or j.scope_key = cast(:scope_key as text))
  and (cast(:kinds as text[]) is null or j.entry = any(cast(:kinds as text[])))
order by j.number
limit :limit

-- name: numbers_of_scope
-- Those of one scope key.
select j.number
from durable.case_journal j
where j.case_id = cast(:case_id as uuid) and j.scope_key = cast(:scope_key as text) and j.number > :after
  and (cast(:kinds as text[]) is null or j.entry = any(cast(:kinds as text[])))
order by j.number
limit :limit

-- name: numbers_of_execution
-- Those of one execution.
select j.number
from durable.case_journal j
where j.execution_id = cast(:execution_id as uuid) and j.case_id = cast(:case_id as uuid) and j.number > :after
  and (cast(:step as text) is null or j.step = cast(:step as text))
  and (cast(:scope_key as text) is null or j.scope_key = cast(:scope_key as text))
  and (cast(:kinds as text[]) is null or j.entry = any(cast(:kinds as text[])))
order by j.number
limit :limit

-- name: entries
-- These entries of a case, in their order.
select cast(j.case_id as text) as case_id, j.number, j.ordinal, cast(j.id as text) as id,
    cast(j.execution_id as text) as execution_id, cast(j.request_id as text) as request_id, j.entry, j.attempt, j.step,
    j.scope_key, j.as_of, j.seq, j.dormancy, cast(j.actor as text) as actor, cast(j.input as text) as input,
    cast(j.guard as text) as guard, cast(j.state as text) as state, cast(j.delta as text) as delta,
    cast(j.error as text) as error, j.salt, j.payload_digest, j.digest, j.chain, j.keyed, j.recorded_at, j.erased_at,
    j.erased_by
from durable.case_journal j
where j.case_id = cast(:case_id as uuid) and j.number = any(cast(:numbers as integer[]))
order by j.number

-- name: erase
-- before: the case is locked
-- after:  the payload of these entries, or of all, is gone; the digest of it stays, and who erased it when
-- locks:  the case row, held already; the entries
update durable.case_journal j
set salt = null, actor = null, input = null, guard = null, state = null, delta = null, error = null,
    erased_at = clock.now, erased_by = cast(:by as text)
from (select durable.durable_now() as now) clock
where j.case_id = cast(:case_id as uuid) and j.erased_at is null
  and (cast(:numbers as integer[]) is null or j.number = any(cast(:numbers as integer[])))
returning j.number

-- name: correlate
-- after: the identifier is this case's; one that was there keeps its id
-- locks: the correlation
insert into durable.case_correlations as r (
    id, system, external_id, case_id, scope_key, step, metadata, created_at, updated_at)
select cast(:id as uuid), cast(:system as text), cast(:external_id as text), cast(:case_id as uuid),
    cast(:scope_key as text), cast(:step as text), cast(:metadata as jsonb), clock.now, clock.now
from (select durable.durable_now() as now) clock
on conflict (system, external_id) do update
set case_id = excluded.case_id, scope_key = excluded.scope_key, step = excluded.step, metadata = excluded.metadata,
    updated_at = excluded.updated_at
returning cast(r.id as text) as id, r.system, r.external_id, cast(r.case_id as text) as case_id, r.scope_key, r.step,
    cast(r.metadata as text) as metadata, r.created_at, r.updated_at

-- name: correlation
-- Whose event it is.
select cast(r.id as text) as id, r.system, r.external_id, cast(r.case_id as text) as case_id, r.scope_key, r.step,
    cast(r.metadata as text) as metadata, r.created_at, r.updated_at
from durable.case_correlations r
where r.system = cast(:system as text) and r.external_id = cast(:external_id as text)
