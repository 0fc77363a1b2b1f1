# Thin on purpose: every target is one or two commands that can be typed without make.
.PHONY: install quickstart test lint bench

install:
	@scripts/bootstrap.sh

quickstart: install
	@.venv/bin/muster launch quickstart

test: lint
	.venv/bin/pytest

lint:
	@scripts/bootstrap.sh --dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict
	.venv/bin/lint-imports

bench: install
	@.venv/bin/python -m benchmarks
