"""Plans and their receipts."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0007_plans.sql")
    apply("0007_guards.sql")
    runs_with_code_from("0001", revision)
