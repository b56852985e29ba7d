-- name: look
-- The declared kinds whose schedule is missing, says something else than the code, or is due. All a quiet second costs.
select d.kind, s.kind is null as missing, clock.now
from jsonb_to_recordset(cast(:declared as jsonb)) as d (kind text, cron text, timezone text, missed text)
cross join (select durable.durable_now() as now) as clock
left join durable.schedules s on s.kind = d.kind
where s.kind is null
    or (s.cron, s.timezone, s.missed) is distinct from (d.cron, d.timezone, d.missed)
    or (s.next_slot <= clock.now and (s.paused_at is null or s.paused_until <= clock.now))
order by s.next_slot, d.kind

-- name: adopt
-- before: the kind has no schedule, but had one under a name it had before
-- after:  that schedule is the kind's, with what it has decided
-- locks:  the schedule's row
update durable.schedules s
set kind = :kind
where s.id = (
        select o.id from durable.schedules o
        where o.kind = any(cast(:formerly as text[]))
        order by o.last_slot desc nulls last
        limit 1
        for no key update skip locked
    )
    and not exists (select from durable.schedules n where n.kind = :kind)

-- name: begin
-- before: the kind has no schedule
-- after:  it has one, which begins now: nothing of the past is due
-- locks:  another session that begins it is waited for, and then nothing is written
insert into durable.schedules (kind, id, cron, timezone, missed, since, next_slot)
values (:kind, cast(:id as uuid), :cron, :timezone, :missed, :now, :next_slot)
on conflict (kind) do nothing

-- name: lock
-- The schedule as it is, and the time once it is locked.
-- locks: the schedule's row, skipping it when somebody has it: they decide what is due
with locked as materialized (
    select cast(s.id as text) as id, s.cron, s.timezone, s.missed, s.last_slot, s.next_slot, s.paused_at, s.paused_until
    from durable.schedules s
    where s.kind = :kind
    for no key update skip locked
),
clock as materialized (
    select durable.durable_now() as now from (select count(*) from locked) as after_the_lock
)
select l.*, clock.now from locked l cross join clock

-- name: advance
-- before: locked in this transaction, in which the rows of the slots that run are written
-- after:  every slot up to last_slot is decided for good; a stretch that was left out is on the row and in the journal
-- locks:  the schedule's row, which is locked already
with advanced as (
    update durable.schedules s
    set cron = :cron,
        timezone = :timezone,
        missed = :missed,
        since = case
            when (s.cron, s.timezone) is distinct from (cast(:cron as text), cast(:timezone as text)) then :now
            else s.since
        end,
        last_slot = greatest(s.last_slot, cast(:last_slot as timestamptz)),
        next_slot = :next_slot,
        paused_at = case when :resumed then null else s.paused_at end,
        paused_until = case when :resumed then null else s.paused_until end,
        paused_by = case when :resumed then null else s.paused_by end,
        paused_reason = case when :resumed then null else s.paused_reason end,
        skipped_from = coalesce(cast(:skipped_from as timestamptz), s.skipped_from),
        skipped_to = coalesce(cast(:skipped_to as timestamptz), s.skipped_to),
        skipped_at = case when cast(:skipped_from as timestamptz) is null then s.skipped_at else :now end
    where s.id = cast(:id as uuid)
    returning s.id
)
insert into durable.journal (row_id, contract, move, fence, facts)
select a.id, 'schedule', 'skip', 0,
    jsonb_build_object('from', cast(:skipped_from as timestamptz), 'to', cast(:skipped_to as timestamptz))
from advanced a
where cast(:skipped_from as timestamptz) is not null
