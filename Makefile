# `make help` lists the targets. Everything runs in .venv, which each target makes when it is missing or stale.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
.DEFAULT_GOAL := help

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "nightmill needs Python 3.11 or newer: set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[worker,dev,bench]"
	touch $@

.PHONY: setup
setup: $(STAMP)  ## make .venv and install nightmill with everything it needs

.PHONY: lint
lint: $(STAMP)  ## ruff, mypy strict, import rules
	$(BIN)/ruff format --check jobs worker kernels migrations tests bench
	$(BIN)/ruff check jobs worker kernels migrations tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: test
test: lint  ## all checks: lint, then the test suite (without the long ones)
	$(BIN)/python -m pytest -m "not long"

.PHONY: test-long
test-long: $(STAMP)  ## the long tests
	$(BIN)/python -m pytest -m long
