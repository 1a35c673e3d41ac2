# Everything runs in .venv inside the checkout, made on first use and again when
# pyproject.toml changes. `make help` lists the targets.

PYTHON ?= python3

# torch goes in first, on its own line, because its default build brings gigabytes of CUDA
# libraries that no test needs. pip takes the CPU build where a configured index or
# find-links has it. Elsewhere, point this at the CPU package index that the "get started"
# page of PyTorch names:
#   make test TORCH_INSTALL='torch==2.13.0 --index-url <the CPU index>'
TORCH_INSTALL ?= torch==2.13.0

# KvikIO, whose device path the tests run with a stub of the CUDA driver: 5 MB without what it
# depends on, 1.4 GB with. cuFile has no version here, because torch pins the one that it needs.
KVIKIO := kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0 \
  cuda-pathfinder==1.9.1 nvidia-cufile

# Two more servers for the tests: Microsoft's emulator of Azure, which is a package for node, and
# OpenStack Swift, whose dependencies stay out of the way in an environment of their own.
AZURITE := azurite@3.37.0
SWIFT := swift==2.38.3

# More arguments for pytest: make test ARGS='tests/unit -k footer'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install test lint format demo torture bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv with the package and everything the checks need

# Most tests wait for other processes, so four files at a time take two cores.
test: lint ## lint, then run the tests
	$(BIN)/python -m pytest -n 4 --dist loadfile $(ARGS)

lint: $(STAMP) ## ruff, mypy and the import layers, one command for people and CI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## fix and format the code the way lint asks for
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

demo: $(STAMP) ## save, flush and resume on this machine
	$(BIN)/python examples/demo.py

torture: $(STAMP) ## the long tests that kill processes and inject faults
	$(BIN)/python -m pytest -m torture $(ARGS)

bench: $(STAMP) ## measure against raw device, memory and stock DCP; minutes, on a quiet machine
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv, the caches and what the demo left
	rm -rf $(VENV) build dist .demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last: an install that was interrupted starts again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dcp_tiered needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "HINT: install one and run 'make PYTHON=python3.11 $(or $(MAKECMDGOALS),install)'." >&2; exit 1; }
	@echo "installing into $(VENV), this takes a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(TORCH_INSTALL)
	$(BIN)/python -m pip install --quiet --group dev -e '.[s3]'
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps $(KVIKIO) || \
	  echo "KvikIO could not be installed: its tests are skipped" >&2
	@mkdir -p $(VENV)/azurite && \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite $(AZURITE) >/dev/null || \
	  echo "Azurite could not be installed, it needs npm: the tests of Azure are skipped" >&2
	@{ $(PYTHON) -m venv $(VENV)/swift && \
	  $(VENV)/swift/bin/python -m pip install --quiet --retries 1 $(SWIFT); } || \
	  echo "OpenStack Swift could not be installed: its tests are skipped" >&2
	@touch $@
