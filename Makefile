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

# Where nothing can be fetched, pip says so in forty lines.
define install
	@echo "installing $(1) into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '$(1)' 2>.venv/pip.log || { \
		missing=$$(sed -n 's/^ *ERROR: No matching distribution found for //p' .venv/pip.log | head -n 1); \
		if [ -n "$$missing" ]; then \
			echo "cannot get $$missing: no package index in reach has it. Connect to the network, or name an index" \
				"(make PIP_INDEX_URL=URL) or a folder of wheels (make PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER);" \
				"pip's own words are in .venv/pip.log"; \
		else cat .venv/pip.log; fi >&2; exit 1; }
endef

.venv/installed: .venv/bin/python pyproject.toml
	$(call install,.)
	@touch $@

.venv/tested: .venv/installed
	$(call install,.[dev])
	@touch $@

demo: .venv/installed  ## Round robin beside cache-aware routing, on simulated engines
	$(BIN)/warmroute demo

test: lint  ## Lint, types, import layers, tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --ignore tests/router/test_processes.py
	$(BIN)/python -m pytest tests/router/test_processes.py

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
