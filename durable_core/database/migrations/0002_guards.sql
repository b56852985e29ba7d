-- Written by durable_core.database.guards from states.py. Do not edit: change the table and write a new migration.
-- The database refuses what is illegal, whoever asks, psql included.

create or replace function durable.guard_delivery() returns trigger
    language plpgsql set search_path = pg_catalog, pg_temp
    as $guard$
declare
    legal boolean;
begin
    if tg_op = 'INSERT' then
        if new.state <> 'pending' or new.fence <> 0 or new.settled_fence <> 0 or new.attempts <> 0 then
            raise exception 'delivery %: a delivery begins pending, unclaimed, with fence 0', new.id
                using errcode = '55000', hint = 'Enqueue it and let a worker claim it.';
        end if;
        return new;
    end if;
    if tg_op = 'DELETE' then
        if old.state not in ('sent', 'failed', 'dead', 'canceled', 'expired') then
            raise exception 'delivery %: it is %, and only finished deliveries may be deleted', old.id, old.state
                using errcode = '55000', hint = 'Only rows that ended may go.';
        end if;
        return old;
    end if;
    if new.id <> old.id or new.kind <> old.kind or new.created_at <> old.created_at
        or new.ordering_key is distinct from old.ordering_key or new.ordering_strict <> old.ordering_strict then
        raise exception 'delivery %: what it is (id, kind, created_at, ordering key) never changes', old.id
            using errcode = '55000', hint = 'Enqueue another delivery.';
    end if;
    if new.key is distinct from old.key
        and (new.key is not null or old.state = 'pending' or new.state <> old.state) then
        raise exception 'delivery %: its key never changes; it may be given up once the delivery has begun', old.id
            using errcode = '55000', hint = 'Enqueue another delivery.';
    end if;
    if new.digest <> old.digest and not (
        old.state = 'pending' and new.state = 'pending' and new.fence = old.fence + 1 and new.settled_fence = new.fence
    ) then
        raise exception 'delivery %: what it is to do never changes, but while it waits and under a new fence', old.id
            using errcode = '55000', hint = 'Whoever has the old arguments could else report on the new ones.';
    end if;
    if new.fence < old.fence or new.settled_fence < old.settled_fence then
        raise exception 'delivery %: a fence never falls (fence % to %, settled % to %)',
            old.id, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'A lower fence would let a worker that lost its claim write again.';
    end if;
    if new.state = old.state then
        return new;
    end if;
    legal := case old.state || ' -> ' || new.state
        when 'pending -> processing' then
            new.fence = old.fence + 1 and new.settled_fence = old.settled_fence
        when 'processing -> sent' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'pending -> sent' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'processing -> pending' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        when 'processing -> failed' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'pending -> failed' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'processing -> dead' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        when 'pending -> dead' then
            new.fence = old.fence and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'pending -> canceled' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'processing -> canceled' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'pending -> expired' then
            new.fence = old.fence and new.settled_fence in (old.settled_fence, new.fence)
        when 'dead -> pending' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        when 'failed -> pending' then
            new.fence = old.fence + 1 and new.settled_fence = new.fence and new.settled_fence > old.settled_fence
        else null
    end;
    if legal is null then
        raise exception 'delivery %: % to % is no legal move', old.id, old.state, new.state
            using errcode = '55000', hint = 'docs/state_machines.md lists the legal moves; use `durable deliveries`.';
    end if;
    if not legal then
        raise exception
            'delivery %: the move % to % breaks its fence rule (fence % to %, settled % to %)',
            old.id, old.state, new.state, old.fence, new.fence, old.settled_fence, new.settled_fence
            using errcode = '55000', hint = 'docs/state_machines.md tells what each move does to the fences.';
    end if;
    return new;
end
$guard$;
