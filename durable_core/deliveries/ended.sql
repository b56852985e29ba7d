-- name: next_of_line
-- The delivery of this line that may be taken now, for a hint: whoever ends one tells the next.
-- Two alone come into question: the oldest that has begun, and the oldest that has not. Where neither may go, none may.
with due as (
    (
        select d.*
        from durable.deliveries d
        where d.ordering_key = :ordering_key and d.state = 'pending' and d.attempts > 0
          and d.due_at <= (select durable.durable_now()) and d.held_reason is null
        order by d.created_at, d.id
        limit 1
    )
    union all
    (
        -- Along its line by the index of that, up to the first that will do. What else is asked stays outside: a planner
        -- without statistics would look for it by another index, and read the whole line to put it in order.
        select d.*
        from (
            select d.*
            from durable.deliveries d
            where d.ordering_key = :ordering_key
              and (d.state in ('pending', 'processing') or (d.ordering_strict and d.state in ('failed', 'dead')))
            order by d.created_at, d.id
            offset 0
        ) as d
        where d.state = 'pending' and d.attempts = 0
          and d.due_at <= (select durable.durable_now()) and d.held_reason is null
        limit 1
    )
)
select cast(d.id as text) as id, d.kind, d.queue, d.priority,
    d.attempts - d.interruptions - d.shutdowns - d.snoozes + 1 as attempt
from due d
where not durable.is_behind(d.id, d.ordering_key, d.created_at, d.attempts > 0, (select durable.durable_now()))
order by d.attempts = 0
limit 1

-- name: remark_hook
-- before: dead in this transaction, and its hook raised
-- after:  one journal line says what; the row is untouched
-- locks:  nothing new
insert into durable.journal (row_id, contract, move, from_state, to_state, fence, reason, facts)
select d.id, 'delivery', 'on_dead failed', d.state, d.state, d.fence, 'HOOK_FAILED',
    jsonb_build_object('error', cast(:said as text))
from durable.deliveries d
where d.id = cast(:id as uuid)
