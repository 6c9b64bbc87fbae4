# Needs Python 3.11 or newer with pip, and make. Everything else goes into .venv.
# `make PYTHON=/path/to/python` picks another interpreter.

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13,\
  $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Two threads on two busy cores can be thirty times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-fast lint chaos bench soak clean
.NOTPARALLEL:

help:
	@echo 'make demo        train the example, break it on purpose, watch it being saved (3 min)'
	@echo 'make test        lint, types and the whole suite (12 min)'
	@echo 'make test-fast   the tests that start no training (1 min)'
	@echo 'make lint        ruff and mypy'
	@echo 'make chaos       kill the supervisor after each of its records, and let another take over (15 min)'
	@echo 'make bench       what the probe costs, beside what others cost'
	@echo 'make soak        undisturbed runs: nothing may happen, and nothing may grow (15 min)'
	@echo 'make clean       remove what the others made, but for runs/'

demo: .venv/installed-demo
	$(BIN)/supervise demo

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-fast: .venv/installed-dev
	$(BIN)/python -m pytest --numprocesses 2 -m 'not slow'

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

chaos: .venv/installed-dev
	$(BIN)/python -m pytest -m chaos

bench: .venv/installed-bench
	$(BIN)/python benchmarks/overhead.py

soak: .venv/installed-demo
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak.py --toy

clean:
	rm -rf .venv build dist benchmarks/.soak .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps keep a second `make` from installing again; a new pyproject.toml does install again.
.venv/installed-demo: .venv/bin/python pyproject.toml
	$(PIP) install --editable '.[torch]'
	@touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@ .venv/installed-demo

.venv/installed-bench: .venv/installed-demo
	$(PIP) install --editable '.[torch,bench]'
	@touch $@

.venv/bin/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'supervise needs Python 3.11 or newer; python3.11 and python3 are not:' >&2; \
	  echo 'install one, or say: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
