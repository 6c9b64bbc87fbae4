# Needs Python 3.11 or newer with pip, and make. Everything else goes into .venv.
# `make PYTHON=/path/to/python` picks another interpreter.

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13,\
  $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
BIN := .venv/bin
# Compiling all that is installed takes as long as installing it; what is imported compiles itself.
# The pip that comes with Python 3.11 takes twice as long as the newest to choose what to install.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile

# Two threads on two busy cores can be thirty times slower than one.
export OMP_NUM_THREADS ?= 1

# Hundreds of processes are started, and each would compile all of the project anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest --numprocesses 2

.PHONY: help demo test test-fast unit integration journeys matrix coverage lint docs recording style chaos \
  fuzz bench page proving proving-live soak clean
.NOTPARALLEL:

help:
	@echo 'make demo        train the example, break it on purpose, watch it being saved (3 min)'
	@echo 'make test        lint, types and the suite (9 min)'
	@echo 'make unit        the tests that need no torch and few processes (1 min); also test-fast'
	@echo 'make integration one part each with real torch training and real processes'
	@echo 'make journeys    whole supervised runs through the command line'
	@echo 'make matrix      frameworks, optimizers, loops and launchers'
	@echo 'make coverage    what the unit lane covers, line by line'
	@echo 'make lint        ruff, mypy and the contracts between the rooms'
	@echo 'make docs        write the generated tables of the READMEs and the JSON schemas'
	@echo 'make recording   run the demo and its twin again for the pictures in the README (3 min)'
	@echo 'make chaos       hundreds of runs under all that can go wrong around them, and dying supervisors (1 h)'
	@echo 'make fuzz        random damage to all that is read, FUZZ_SECONDS=600 for each of seven surfaces (70 min)'
	@echo 'make bench       what the probe costs, beside what others cost'
	@echo 'make page        the page of supervise web in a browser (needs chromium, npm; 10 min)'
	@echo 'make proving     score all policies on the recordings of small training programs (3 min)'
	@echo 'make proving-live  record what each remedy is worth on them (1 h), resumes'
	@echo 'make soak        undisturbed runs: nothing may happen, and nothing may grow (15 min)'
	@echo 'make clean       remove what the others made, but for runs/'

demo: .venv/installed-demo
	$(BIN)/supervise demo

# mypy runs beside the tests and reports after them. Files come in the order of their names:
# the few long ones are in the middle, so that no worker is left alone with one of them at the end.
test: style
	@said=$$(mktemp); $(BIN)/mypy >$$said 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null; rm -f $$said' EXIT; trap 'exit 130' INT TERM; \
	echo '$(PYTEST) --dist loadfile --no-loadscope-reorder, $(BIN)/mypy beside it'; \
	$(PYTEST) --dist loadfile --no-loadscope-reorder; tested=$$?; \
	wait $$types; typed=$$?; echo '$(BIN)/mypy'; cat $$said; \
	exit $$((tested || typed))

# The lanes: conftest.py puts each test into one.
unit integration journeys matrix: .venv/installed-dev
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m $@

test-fast: unit

coverage: .venv/installed-dev
	$(PYTEST) --dist loadfile -m unit --cov --cov-report term:skip-covered

lint: style
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev
	$(BIN)/python -m supervise.catalog.docs
	$(BIN)/cog -r -p 'import sys; sys.path.insert(0, "docs"); import tables as docs' \
	  policies/README.md runbooks/README.md probes/README.md

recording: .venv/installed-dev
	$(BIN)/python docs/recording.py
	$(BIN)/python docs/curve.py --record

style: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

chaos: .venv/installed-dev
	$(BIN)/python tests/chaos/drive.py
	$(BIN)/python -m pytest -m chaos

FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0

fuzz: .venv/installed-dev
	$(PYTEST) -m 'not slow and not chaos' --hypothesis-profile random
	$(BIN)/python -m tests.fuzz.drive --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

bench: .venv/installed-bench
	$(BIN)/python benchmarks/overhead.py

page: .venv/installed-dev
	$(BIN)/python tests/web/drive.py

proving: .venv/installed-dev
	$(BIN)/python benchmarks/proving/score.py

proving-live: .venv/installed-dev
	$(BIN)/python benchmarks/proving/live.py

soak: .venv/installed-demo
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak.py --toy

clean:
	rm -rf .venv .cache build dist benchmarks/.soak .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps keep a second `make` from installing again; a new pyproject.toml does install again.
.venv/installed-demo: .venv/bin/python pyproject.toml
	$(INSTALL) --editable '.[torch]'
	@touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml
	$(INSTALL) --editable '.[dev]'
	@touch $@ .venv/installed-demo

.venv/installed-bench: .venv/installed-demo
	$(INSTALL) --editable '.[torch,bench]'
	@touch $@

.venv/bin/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'supervise needs Python 3.11 or newer; python3.11 and python3 are not:' >&2; \
	  echo 'install one, or say: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(INSTALL) --upgrade pip
