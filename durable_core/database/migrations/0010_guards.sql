-- Written by durable_core.database.guards from states.py. Do not edit: change the table and write a new migration.
-- The database refuses what is illegal, whoever asks, psql included.

create or replace function durable.guard_plan() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    legal boolean;
begin
    if tg_op = 'INSERT' then
        if new.state <> 'pending' or new.fence <> 0 or new.settled_fence <> 0 or new.receipts <> 0
            or new.approved_by is not null or new.approved_at is not null or new.kind <> new.steps -> 0 ->> 'kind' then
            raise exception 'plan %: a plan begins pending, approved by nobody, with fence 0 and no receipt', new.id
                using errcode = '55000', hint = 'Propose it, and let a person approve it.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.state not in ('executed', 'failed', 'rejected', 'expired') then
            raise exception 'plan %: it is %, and only finished plans may be deleted', old.id, old.state
                using errcode = '55000', hint = 'Only rows that ended may go.';
        end if;
        return old;
    end if;
    if old.state in ('executed', 'failed', 'rejected', 'expired') and new is distinct from old then
        raise exception 'plan %: it is %, and nothing of it changes any more', old.id, old.state
            using errcode = '55000', hint = 'To try again, propose again.';
    end if;
    if new.id <> old.id or new.steps <> old.steps or new.step_count <> old.step_count or new.digest <> old.digest
        or new.scopes <> old.scopes or new.risk <> old.risk or new.self_approval <> old.self_approval
        or new.proposed_by <> old.proposed_by or new.created_at <> old.created_at or new.expires_at <> old.expires_at
        or new.origin is distinct from old.origin or new.rationale is distinct from old.rationale
        or new.compensates is distinct from old.compensates then
        raise exception 'plan %: what was proposed never changes', old.id
            using errcode = '55000', hint = 'Propose another plan.';
    end if;
    if new.approved_by is distinct from old.approved_by or new.approved_at is distinct from old.approved_at then
        if old.state <> 'pending' or new.state <> 'approved' then
            raise exception 'plan %: who approved it, and when, never changes', old.id
                using errcode = '55000', hint = 'Propose another plan.';
        end if;
    end if;
    if old.state = 'pending' and new.state = 'approved' and new.approved_by = old.proposed_by
        and not old.self_approval then
        raise exception 'plan %: its proposer may not approve it', old.id
            using errcode = '55000', hint = 'Somebody else approves it.';
    end if;
    -- Our statements lock, then compare, then stamp; the clock goes on from there to here. So a stamp from before the
    -- end is believed for ten seconds after it, and no stamp for longer.
    if ((old.state = 'pending' and new.state = 'approved') or (old.state = 'approved' and new.state = 'executing'))
        and old.expires_at <= durable.durable_now() - (case
            when old.state = 'pending' and new.approved_at < old.expires_at then interval '10 s'
            when old.state = 'approved' and new.claimed_at < old.expires_at then interval '10 s'
            else interval '0' end) then
        raise exception 'plan %: it expired at %, and can be neither approved nor started', old.id, old.expires_at
            using errcode = '55000', hint = 'Propose it again.';
    end if;
    if new.state in ('pending', 'approved', 'executing')
        and new.kind <> new.steps -> cast(least(new.receipts, new.step_count - 1) as integer) ->> 'kind' then
        raise exception 'plan %: % is not the kind of the step that was approved as the next', old.id, new.kind
            using errcode = '55000', hint = 'Propose another plan.';
    end if;
    if new.receipts <> old.receipts and not (
        old.state = 'executing' and old.owner is not null and new.owner is null and new.receipts = old.receipts + 1
        and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        and exists (
            select from durable.plan_receipts r
            where r.plan_id = old.id and r.step = old.receipts and (r.outcome = 'ok') = (new.state <> 'failed'))
    ) then
        raise exception 'plan %: receipts go from % to % without a step that wrote one',
            old.id, old.receipts, new.receipts
            using errcode = '55000', hint = 'A step, its receipt and this count commit together.';
    end if;
    if new.owner is not null and new.fence <> old.fence + 1
        and (old.owner is distinct from new.owner or old.owner_pid is distinct from new.owner_pid) then
        raise exception 'plan %: a claim raises the fence by one (fence % to %)', old.id, old.fence, new.fence
            using errcode = '55000', hint = 'Two owners of one fence could both write.';
    end if;
    if new.fence < old.fence or new.settled_fence < old.settled_fence then
        raise exception 'plan %: a fence never falls (fence % to %, settled % to %)',
            old.id, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'A lower fence would let a worker that lost its claim write again.';
    end if;
    if new.state = old.state then
        return new;
    end if;
    legal := case old.state || ' -> ' || new.state
        when 'pending -> approved' then
            new.fence = old.fence and new.settled_fence = old.settled_fence
        when 'pending -> rejected' then
            new.fence = old.fence and new.settled_fence = old.settled_fence
        when 'pending -> expired' then
            new.fence = old.fence and new.settled_fence = old.settled_fence
        when 'approved -> expired' then
            new.fence = old.fence and new.settled_fence = old.settled_fence
        when 'approved -> executing' then
            new.fence = old.fence + 1 and new.settled_fence = old.settled_fence
        when 'executing -> executed' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        when 'executing -> failed' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        else null
    end;
    if legal is null then
        raise exception 'plan %: % to % is no legal move', old.id, old.state, new.state
            using errcode = '55000', hint = 'docs/state_machines.md lists the legal moves; use `durable plans`.';
    end if;
    if not legal then
        raise exception
            'plan %: the move % to % breaks its fence rule (fence % to %, settled % to %)',
            old.id, old.state, new.state, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'docs/state_machines.md tells what each move does to the fences.';
    end if;
    return new;
end
$guard$;
