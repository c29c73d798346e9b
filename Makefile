# Every target sets up its own environment in .venv, again whenever the lock or the project file changes.
#   make test                       the default tier of the suite (15 to 25 minutes on two cores)
#   make test-full                  every case
#   make test PYTHON=python3.12     with another interpreter (3.11 to 3.13)
# Without a GPU, let pip find a CPU build of torch first (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL): it saves gigabytes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	if "$$name" -c '$(FITS)' 2>/dev/null; then echo "$$name"; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' requirements.lock)

.PHONY: help demo test test-full wheel lint format bench gpu docs clean

help: ## say what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: $(STAMP) ## plan, verify, train, save and resume a small Llama on two processes (about two minutes)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: $(STAMP) ## run the default tier of the suite (ARGS="tests/plan -k mesh" for a part)
	@$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/house --ignore=tests/docs $(ARGS)

test-full: $(STAMP) ## run every case of the suite, with the checks of sources and pages
	@$(BIN)/python -m pytest -n 2 --dist worksteal --full $(ARGS)

wheel: $(STAMP) ## build a wheel, install it into a fresh environment, and plan a run with it
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation -w build/wheel .
	@"$(PYTHON)" -m venv build/wheel/env
	@build/wheel/env/bin/python -m pip --disable-pip-version-check install --quiet '$(TORCH)'
	@build/wheel/env/bin/python -m pip --disable-pip-version-check install --quiet -c requirements.lock build/wheel/*.whl
	@cd build/wheel && env/bin/meshwright --version && \
		env/bin/meshwright search "8b: layers 32 hidden 4096 heads 32" --devices 8 --hardware h100 --batch 64 --sequence 2048 --out found.toml

lint: $(STAMP) ## check style, types, layers, spelling, house rules and pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/python -m pytest -q -n 2 tests/house tests/docs

format: $(STAMP) ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## run one benchmark: make bench NAME=engine_overhead
	@if [ -z "$(NAME)" ]; then \
		echo "which one? make bench NAME=..., one of:" >&2; \
		grep -rl '^if __name__ ==' benchmarks | sed -E 's|.*/(.*)\.py|  \1|' | sort >&2; exit 2; fi
	@$(BIN)/python -m $(subst /,.,$(basename $(or $(shell find benchmarks -name '$(NAME).py'),benchmarks/$(NAME).py)))

gpu: $(STAMP) ## on one GPU, at most nine minutes: parity, races, speed, memory, failures; results in benchmarks/results/gpu
	@$(BIN)/python -m benchmarks.gpu.sections $(ARGS)

docs: $(STAMP) ## write the generated pages, and build the site into build/docs (warnings and broken links are errors)
	@$(BIN)/python -m docs.generate > /dev/null
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs build/docs
	@echo "build/docs/index.html"

clean: ## remove what was made here: the environment, caches; runs stay
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, by itself: pinned, so that nothing pulls another build of it along.
$(STAMP): requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c '$(FITS)' 2>/dev/null; then \
		echo "found: $$("$(or $(PYTHON),python3)" --version 2>&1 | head -1)" >&2; \
		echo "needed: Python 3.11, 3.12 or 3.13" >&2; \
		echo "repair: install one, then say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@echo "setting up $(VENV) with $$("$(PYTHON)" --version); the first time takes some minutes"
	@"$(PYTHON)" -m venv $(VENV) || { \
		echo "repair: on Debian and Ubuntu, apt-get install python3-venv; then run make again" >&2; rm -rf $(VENV); exit 1; }
	@$(PIP) '$(TORCH)'
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
