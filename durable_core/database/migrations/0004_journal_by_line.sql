-- The journal by its own numbering, newest first, over all rows: what moved in the last hour, and what fails just now.
-- Locks `journal` against writes while the index is built, one reading of the table. A line is written for a failure, a
-- rescue or an act of a person, never for the happy path, so the index costs what goes well nothing.

create index journal_by_line on durable.journal (seq);
