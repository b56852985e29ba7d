# Python 3.11 or newer; the set-up looks for a newer one itself where this is too old.
PYTHON ?= python3
# More arguments for pytest and the benchmark: make test ARGS="-k retry"
ARGS ?=

.PHONY: help demo test test-long bench lint spec docs setup lock
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## run an example shop while its workers are killed, and count what was lost: nothing
	@.venv/bin/durable demo

test: setup ## run all tests against a real Postgres and a real Valkey
	@.venv/bin/python .ci/tests.py $(ARGS)

test-long: setup ## run the scenarios that stop, freeze and fill servers of their own, and all others at full size
	@.venv/bin/python .ci/tests.py --long $(ARGS)

bench: setup ## measure what a delivery costs beside plain Celery, about six minutes; ARGS=--quick for two
	@.venv/bin/python -m bench $(ARGS)

lint: setup ## check style and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy durable_core tasks

spec: setup ## show, contract by contract, which numbered cases a passing test proves
	@.venv/bin/python -m tests.spec

docs: setup ## build the documentation into .site/, after writing the page of the commands anew
	@.venv/bin/python -m durable_core.cli.page
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "the documentation is in .site/index.html"

setup: ## make .venv, where the lock changed since the last time; every other command does it too
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo "setup: no $(PYTHON) here: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" .ci/setup.py

lock: setup ## bring requirements.lock up to date with pyproject.toml
	@.venv/bin/uv pip compile pyproject.toml --universal --all-extras --generate-hashes --no-annotate --no-emit-package durable-core --custom-compile-command "make lock" -q -o requirements.lock
	@! grep -n '://' requirements.lock
