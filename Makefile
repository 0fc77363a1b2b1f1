# Thin on purpose: every target is one or two commands that can be typed without make.
.PHONY: install quickstart test lint control-plane bench

install:
	@scripts/bootstrap.sh

quickstart: install
	@.venv/bin/muster launch quickstart

test: lint control-plane
	.venv/bin/pytest

# A Kubernetes control plane for tests/cluster: minutes the first time, skipped where Go is missing.
control-plane:
	@scripts/bootstrap.sh --dev
	@.venv/bin/python -m tests.cluster.build

lint:
	@scripts/bootstrap.sh --dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --strict
	.venv/bin/lint-imports

bench: install
	@.venv/bin/python -m benchmarks
