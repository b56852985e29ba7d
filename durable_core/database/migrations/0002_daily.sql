-- Order, expiry, discards and pauses.
-- Locks `deliveries` against writes while its six small indexes are built, one reading of the table each.

alter table durable.deliveries
    add column ordering_key    text constraint ordering_key_fits_an_index check (octet_length(ordering_key) between 1 and 1000),
    add column ordering_strict boolean not null default false,
    add column expires_at      timestamptz constraint expires_before_year_9000 check (expires_at < '9000-01-01'),
    add column discarded_at    timestamptz,
    add constraint discarded_only_when_it_needs_a_person check (discarded_at is null or state in ('failed', 'dead'));

comment on column durable.deliveries.ordering_key is
    'Deliveries of one ordering key run one at a time, of all kinds, oldest committed first.';
comment on column durable.deliveries.ordering_strict is
    'Whether this delivery, once failed or dead, keeps those behind it waiting until a person acts.';
comment on column durable.deliveries.discarded_at is
    'When a person gave up on a failed or dead delivery: it is pruned after its retention, and holds up nobody.';

-- One at a time: of two claims that do not see each other, the second is refused.
create unique index deliveries_one_of_a_line on durable.deliveries (ordering_key)
    where state = 'processing' and ordering_key is not null;
-- Who stands before whom, and who is next.
create index deliveries_line on durable.deliveries (ordering_key, created_at, id)
    where ordering_key is not null
    and (state in ('pending', 'processing') or (ordering_strict and state in ('failed', 'dead')));
create index deliveries_begun on durable.deliveries (ordering_key, created_at, id)
    where ordering_key is not null and state = 'pending' and attempts > 0;
create index deliveries_kept on durable.deliveries (ordering_key, created_at, id)
    where ordering_key is not null and ordering_strict and state in ('failed', 'dead') and discarded_at is null;
-- Expire.
create index deliveries_expiring on durable.deliveries (expires_at) where state = 'pending' and expires_at is not null;
-- Prune.
create index deliveries_discarded on durable.deliveries (discarded_at) where discarded_at is not null;

create table durable.pauses (
    id         bigint      primary key generated always as identity,
    what       text        not null constraint queues_and_kinds_are_paused check (what in ('queue', 'kind')),
    name       text        not null constraint paused_has_a_name check (length(name) between 1 and 200),
    by_whom    text        not null,
    reason     text        not null,
    since      timestamptz not null default durable.durable_now(),
    until      timestamptz,
    ended_at   timestamptz,
    ended_by   text
);

comment on table durable.pauses is
    'Queues and kinds of which nothing is claimed: who, why, until when. Ended ones stay, as the history of it.';

create unique index pauses_in_force on durable.pauses (what, name) where ended_at is null;

-- Whether another delivery of its line goes before this one. Whoever has begun goes first, then the older; one that
-- has not begun and is not due yet stands aside.
create function durable.is_behind(
    of_id uuid, of_line text, of_created_at timestamptz, has_begun boolean, as_of timestamptz
) returns boolean
    language sql stable parallel safe
    -- Each finds its row by an index, so that a line may be long.
    return exists (
            select from durable.deliveries o
            where o.ordering_key = of_line and o.state = 'processing' and o.id <> of_id)
        or exists (
            select from durable.deliveries o
            where o.ordering_key = of_line and o.state = 'pending' and o.attempts > 0
              and (o.created_at, o.id) < (of_created_at, of_id))
        or (not has_begun and exists (
            select from durable.deliveries o
            where o.ordering_key = of_line and o.state = 'pending' and o.attempts > 0 and o.id <> of_id))
        or (not has_begun and exists (
            select from durable.deliveries o
            where o.ordering_key = of_line and o.state = 'pending' and o.due_at <= as_of
              and (o.created_at, o.id) < (of_created_at, of_id)))
        or exists (
            select from durable.deliveries o
            where o.ordering_key = of_line and o.ordering_strict and o.state in ('failed', 'dead')
              and o.discarded_at is null
              and (o.created_at, o.id) < (of_created_at, of_id));

-- What a sweep looks for as it begins. Volatile, so that they are planned and take their lock on the table when they
-- are called, under the bound that the sweep's statement has set by then. Written into that statement, they would have
-- it wait for the table before it begins.
create function durable.due_queues() returns setof text
    language sql volatile
begin atomic
    with recursive hop (queue) as (
        (select d.queue
         from durable.deliveries d
         where d.state = 'pending'
         order by d.queue
         limit 1)
        union all
        select (
            select d.queue
            from durable.deliveries d
            where d.state = 'pending' and d.queue > h.queue
            order by d.queue
            limit 1)
        from hop h
        where h.queue is not null
    )
    select h.queue
    from hop h
    where h.queue is not null
      and exists (
        select from durable.deliveries d
        where d.state = 'pending' and d.queue = h.queue and d.hint_at <= (select durable.durable_now()));
end;

create function durable.a_lease_is_over() returns boolean
    language sql volatile
    return exists (
        select from durable.deliveries d
        where d.state = 'processing' and d.held_reason is null
          and d.lease_expires_at <= (select durable.durable_now()));

create function durable.one_is_overdue() returns boolean
    language sql volatile
    -- The first in the order of its index: a planner that knows many times, and few that are over, would read the table.
    return coalesce((
        select d.expires_at from durable.deliveries d
        where d.state = 'pending' and d.held_reason is null and d.expires_at is not null
        order by d.expires_at
        limit 1) <= durable.durable_now(), false);
