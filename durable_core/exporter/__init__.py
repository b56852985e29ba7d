"""What Prometheus reads: one process looks at the rows, and keeps the page that it serves. Nothing else counts."""
