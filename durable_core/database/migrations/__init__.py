"""Alembic as the runner, plain SQL as the content; a version table of our own in the schema of our own."""
