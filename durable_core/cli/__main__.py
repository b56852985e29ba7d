"""`python -m durable_core.cli`, for where the `durable` script is not on PATH."""

from durable_core.cli.main import main

main(prog_name="durable")
