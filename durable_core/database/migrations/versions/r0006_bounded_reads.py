"""Dead letters without the discarded ones, and two questions that every reader asks as functions."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0006_bounded_reads.sql")
    runs_with_code_from("0001", revision)
