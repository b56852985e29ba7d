"""What tests of traces ask of spans and rows."""

from sqlalchemy import text

SECRET = "a secret of the customer"


def named(spans, name):
    (found,) = [span for span in spans() if span.name == name]
    return found


def kept(engine, row_id):
    with engine.connect() as tx:
        return tx.scalar(text("select trace from durable.deliveries where id = :id"), {"id": row_id})


def written(span):
    """The context of a span, as a row keeps it."""
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
