"""What `durable doctor` looks at that needs no Celery: the schema, the server, the work that waits, this process."""
