"""Alembic's entry: run the revisions on the connection that `migrate.py` hands over, or print them."""

from alembic import context

from durable_core.database.statements import current_schema

online = context.config.attributes.get("connection")
context.configure(
    connection=None if context.is_offline_mode() else online,
    dialect_name="postgresql",
    # For printed SQL: in psycopg's own parameter style every '%' of the guards would come out twice.
    dialect_opts={"paramstyle": "named"},
    literal_binds=context.is_offline_mode(),
    version_table="schema_version",
    version_table_schema=current_schema(),
    target_metadata=None,
)
with context.begin_transaction():
    context.run_migrations()
