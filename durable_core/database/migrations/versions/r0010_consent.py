"""The guard of plans knows the clock: consent that is over neither approves nor starts."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0010_guards.sql")
    runs_with_code_from("0001", revision)
