"""Operations: issued once outside, then polled."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0008_operations.sql")
    apply("0008_guards.sql")
    runs_with_code_from("0001", revision)
