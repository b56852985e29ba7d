-- name: hinted
-- From when on a hint of its next step is sent again; whoever claims it begins anew.
select p.hint_at from durable.plans p where p.id = cast(:id as uuid)
