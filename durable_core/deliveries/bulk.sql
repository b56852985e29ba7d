-- name: chosen
-- The next ids that a filter chooses, by id: so a bulk move that broke off goes on where its rows are still to be moved.
select cast(d.id as text) as id
from durable.deliveries d
where d.state = any (cast(:states as text[]))
  and (cast(:ids as uuid[]) is null or d.id = any (cast(:ids as uuid[])))
  and (cast(:after as uuid) is null or d.id > cast(:after as uuid))
  and (cast(:kind as text) is null or d.kind = :kind)
  and (cast(:queue as text) is null or d.queue = :queue)
  and (cast(:error_code as text) is null or d.error_code = :error_code)
  and (cast(:ordering_key as text) is null or d.ordering_key = :ordering_key)
  and (cast(:older_seconds as float8) is null
      or d.created_at <= (select durable.durable_now() - make_interval(secs => :older_seconds)))
  -- Said so that the indexes of what is still failed or dead do not offer themselves: all they hold would be read for a
  -- batch of ids.
  and num_nonnulls(d.discarded_at) = 0
order by d.id
limit :limit
