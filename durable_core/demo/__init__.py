"""A shop whose workers are killed and frozen and whose Redis is emptied, while its deliveries go on. `run.main`."""
