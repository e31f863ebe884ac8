# make demo        the main job on a fresh machine: engine, plugin, random model, stock against tiers
# make test        everything that needs no GPU: lint, types, layers, tests; under 4 minutes on 2 cores that do nothing else,
#                  some minutes more the first time, when the plugin and the tests' own libraries are compiled;
#                  `--durations=30` behind the command below lists the slowest
# make test-deep   what takes longer: a llama.cpp built from source, every architecture, the lowest allowed versions
# make test-mutants  plants bugs one at a time in a copy of the package: the tests must catch each
# make sanitize    the plugin and the fake GPUs under ASan with UBSan, then under TSan: a report fails (tests/sanitize/run.py)
# make tidy        clang-tidy over all C and C++ (.clang-tidy); part of test-deep, as it takes too long for lint
# make lint        ruff, clang-format, mypy and the layers; `make format` writes what the two formatters ask for
# make fuzz        fuzzes the reading of models for SECONDS=60, guided by coverage; finds go to build/fuzz-finds
# Each makes its own environment in .venv first; needs Python 3.11 or newer, a C++17 compiler and the network once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Strict editable installs link single files: a new or removed one needs the install again.
SOURCES := $(shell find src tiers planner hip engine_adapter -name '*.py' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.h' -o -name py.typed)

CPP_FILES := $(shell find engine_adapter hip tests benchmarks \( -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.h' \) -not -path '*/build/*')

SECONDS ?= 60

# What pytest rewrites is kept, whatever the user's shell says: it takes each of its processes 5 s.
test test-deep: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-deep test-mutants fuzz sanitize tidy lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-llama
	$(BIN)/expertier demo

test: lint
	$(BIN)/pytest -q -m "not deep" -n 2 --dist worksteal

test-deep: lint tidy
	$(BIN)/pytest -q --hypothesis-profile=deep

test-mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py

sanitize: $(VENV)/.installed-dev
	$(BIN)/python tests/sanitize/run.py

tidy: $(VENV)/.installed-dev $(VENV)/.installed-tidy
	$(BIN)/python tests/tidy.py

fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python tests/fuzz/run_atheris.py --seconds $(SECONDS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.installed-llama: pyproject.toml $(VENV)/.files
	$(BIN)/pip install -q -e '.[llama]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.files
	$(BIN)/pip install -q -e '.[llama,dev]'
	touch $@

$(VENV)/.installed-fuzz: pyproject.toml $(VENV)/.files
	$(BIN)/pip install -q -e '.[fuzz]'
	touch $@

$(VENV)/.installed-tidy: pyproject.toml $(VENV)/.files
	$(BIN)/pip install -q -e '.[tidy]'
	touch $@

# Rewritten only when the list of source files changes.
$(VENV)/.files: $(VENV)/bin/python FORCE
	@printf '%s\n' $(sort $(SOURCES)) | cmp -s - $@ || printf '%s\n' $(sort $(SOURCES)) > $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expertier needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "no virtual environment could be made; on Debian or Ubuntu: apt install python3-venv"; exit 2; }

FORCE:

clean:
	rm -rf $(VENV) build *.egg-info
