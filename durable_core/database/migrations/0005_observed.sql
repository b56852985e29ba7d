-- What is read by those who watch, and what a trace needs. The column is added without a look at the rows.
-- Locks `journal` against writes while its index is built, one reading of the table; to it write failures, rescues and
-- acts of people, not the happy path.

-- The journal from some instant on, in the order in which it was written.
create index journal_at on durable.journal (at, seq);

alter table durable.deliveries
    add column trace text;

comment on column durable.deliveries.trace is
    'The traceparent, and behind a space the tracestate, of the span in which it was enqueued; null without tracing.';
