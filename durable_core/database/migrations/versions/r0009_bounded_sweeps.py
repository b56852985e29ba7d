"""Indexes and questions by which the sweeps of plans and operations are bounded."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0009_bounded_sweeps.sql")
    runs_with_code_from("0001", revision)
