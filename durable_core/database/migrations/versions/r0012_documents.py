"""Documents: their current version each, and the versions before it."""

from durable_core.database.migrate import apply, runs_with_code_from

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply("0012_documents.sql")
    runs_with_code_from("0001", revision)
