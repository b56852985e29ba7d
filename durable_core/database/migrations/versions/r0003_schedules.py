"""The schedules of periodic kinds."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0003_schedules.sql")
    runs_with_code_from("0001", revision)
