"""Cases: state documents, their claims and journal, and the events from outside."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0011_cases.sql")
    runs_with_code_from("0001", revision)
