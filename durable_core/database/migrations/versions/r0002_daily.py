"""Order, expiry, discards and pauses, and what a key's policies may change of a waiting row."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0002_daily.sql", "0002_guards.sql")
    runs_with_code_from("0001", revision)
