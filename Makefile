PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install demo test lint bench clean

help:  ## What can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 10

install: .venv/installed  ## Makes the environment in .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "warmroute needs Python 3.11 or newer; say which with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: .venv/installed  ## Round robin beside cache-aware routing, on simulated engines
	$(BIN)/warmroute demo

test: lint  ## Lint, types, import layers, tests
	$(BIN)/python -m pytest

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/tested  ## Benchmarks; see docs/benchmarks.md
	WARMROUTE_PEER_PYTHON=$(WARMROUTE_PEER_PYTHON) $(BIN)/python -m pytest tests/bench \
		--override-ini=norecursedirs=data --timeout=900 -s

clean:  ## Takes away the environment and what tools left behind
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
