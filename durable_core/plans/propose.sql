-- name: propose
-- before: the caller's transaction is open
-- after:  one pending plan and its first line of history, which commit or vanish with the caller's own rows; no row back
--         means that the plan which it makes up for has another compensation by now
-- Steps come as text: their canonical form, over which the digest was made.
with clock as materialized (
    select durable.durable_now() as now
),
proposed as (
    insert into durable.plans
        (id, origin, risk, rationale, steps, step_count, digest, scopes, self_approval, proposed_by, compensates,
         kind, queue, created_at, expires_at)
    select cast(:id as uuid), cast(:origin as text), :risk, cast(:rationale as text), cast(:steps as jsonb),
        :step_count, :digest, cast(:scopes as text[]), :self_approval, :by, cast(:compensates as uuid),
        :kind, :queue, clock.now, clock.now + make_interval(secs => :expires_seconds)
    from clock
    -- Two that compensate one plan at once: the second finds it done. A snapshot that is older gets 40001.
    on conflict (compensates) where compensates is not null
        and state in ('pending', 'approved', 'executing', 'executed') do nothing
    returning id, created_at, expires_at
),
journalled as (
    insert into durable.journal (row_id, contract, move, to_state, fence, by_whom, facts)
    select p.id, 'plan', 'propose', 'pending', 0, cast(:by as text),
        jsonb_build_object('digest', cast(:digest as text), 'steps', cast(:step_count as integer))
    from proposed p
)
select cast(p.id as text) as id, p.created_at, p.expires_at from proposed p
