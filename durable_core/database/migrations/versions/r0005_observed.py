"""The journal by its time, for those who watch, and the trace in which a delivery was enqueued."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0005_observed.sql")
    runs_with_code_from("0001", revision)
