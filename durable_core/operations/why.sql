-- name: hinted
-- From when on a hint is sent again; whoever claims it begins anew.
select o.hint_at from durable.operations o where o.id = cast(:id as uuid)
