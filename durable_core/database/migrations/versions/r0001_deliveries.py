"""The clock, the loops, the journal and the deliveries, with their guards."""

from durable_core.database.migrate import apply

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0001_deliveries.sql", "0001_guards.sql")
