-- What is read by those who watch.
-- Locks `journal` against writes while its index is built, one reading of the table; to it write failures, rescues and
-- acts of people, not the happy path.

-- The journal from some instant on, in the order in which it was written.
create index journal_at on durable.journal (at, seq);
