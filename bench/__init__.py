"""What one delivery costs, beside plain Celery on the same machine in the same minutes: `make bench`."""
