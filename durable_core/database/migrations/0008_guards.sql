-- Written by durable_core.database.guards from states.py. Do not edit: change the table and write a new migration.
-- The database refuses what is illegal, whoever asks, psql included.

create function durable.guard_operation() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    legal boolean;
begin
    if tg_op = 'INSERT' then
        if new.state <> 'queued' or new.fence <> 0 or new.settled_fence <> 0 or new.issued_at is not null then
            raise exception 'operation %: an operation begins queued, not issued, with fence 0', new.id
                using errcode = '55000', hint = 'Start it, and let a worker issue it.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.state not in ('succeeded', 'failed', 'canceled') then
            raise exception 'operation %: it is %, and only finished operations may be deleted', old.id, old.state
                using errcode = '55000', hint = 'Only rows that ended may go.';
        end if;
        return old;
    end if;
    if old.state in ('succeeded', 'failed', 'canceled') and new is distinct from old then
        raise exception 'operation %: it is %, and nothing of it changes any more', old.id, old.state
            using errcode = '55000', hint = 'To try again, start another operation.';
    end if;
    if new.id <> old.id or new.kind <> old.kind or new.key is distinct from old.key or new.arguments <> old.arguments
        or new.digest <> old.digest or new.started_by <> old.started_by or new.created_at <> old.created_at
        or new.one_in_flight <> old.one_in_flight or new.trigger <> old.trigger
        or new.patience_seconds <> old.patience_seconds or new.every_seconds <> old.every_seconds then
        raise exception 'operation %: what was started never changes', old.id
            using errcode = '55000', hint = 'Start another operation.';
    end if;
    if new.issued_at is distinct from old.issued_at and not (old.state = 'queued' and new.state = 'running') then
        raise exception 'operation %: its call is issued at most once', old.id
            using errcode = '55000', hint = 'Nothing may issue it again; look at the other side what became of it.';
    end if;
    if old.external_ids is not null and new.external_ids is distinct from old.external_ids then
        raise exception 'operation %: the ids of the other side never change once they are known', old.id
            using errcode = '55000', hint = 'Start another operation.';
    end if;
    if new.owner is not null and new.fence <> old.fence + 1
        and (old.owner is distinct from new.owner or old.owner_pid is distinct from new.owner_pid) then
        raise exception 'operation %: a claim raises the fence by one (fence % to %)', old.id, old.fence, new.fence
            using errcode = '55000', hint = 'Two owners of one fence could both write.';
    end if;
    if new.fence < old.fence or new.settled_fence < old.settled_fence then
        raise exception 'operation %: a fence never falls (fence % to %, settled % to %)',
            old.id, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'A lower fence would let a worker that lost its claim write again.';
    end if;
    if new.state = old.state then
        return new;
    end if;
    legal := case old.state || ' -> ' || new.state
        when 'queued -> running' then
            new.fence = old.fence + 1 and new.settled_fence = old.settled_fence
        when 'queued -> failed' then
            new.fence = old.fence and new.settled_fence = old.settled_fence
        when 'queued -> canceled' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'running -> succeeded' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'running -> failed' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        when 'running -> canceled' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        else null
    end;
    if legal is null then
        raise exception 'operation %: % to % is no legal move', old.id, old.state, new.state
            using errcode = '55000', hint = 'docs/state_machines.md lists the legal moves; use `durable operations`.';
    end if;
    if not legal then
        raise exception
            'operation %: the move % to % breaks its fence rule (fence % to %, settled % to %)',
            old.id, old.state, new.state, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'docs/state_machines.md tells what each move does to the fences.';
    end if;
    return new;
end
$guard$;

create trigger guard_operation before insert or update or delete on durable.operations
    for each row execute function durable.guard_operation();
