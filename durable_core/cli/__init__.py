"""The `durable` command: tables for people, one JSON value for programs, and exit codes that both can rely on."""
