"""An index on the journal, to read it newest first."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0004_journal_by_line.sql")
    runs_with_code_from("0001", revision)
