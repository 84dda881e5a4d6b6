# What a user or a developer of Paceline types. Everything lives in .venv beside this file; a target
# redoes only what pyproject.toml, or this file's TORCH, has changed. Paths are relative on purpose:
# make cannot handle absolute ones with spaces.

PYTHON ?=
TORCH  ?= torch==2.13.0
MODEL  ?= smollm2-135m-instruct
HOST   ?= 127.0.0.1
PORT   ?= 8000
ARGS   ?=

VENV := .venv
PY   := $(VENV)/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Progress bars are for people: none in CI, none without a terminal. pip reads both, wherever it is started.
ifneq ($(CI)$(shell test -t 2 || echo no),)
export PIP_QUIET := 1
export PIP_PROGRESS_BAR := off
endif

.DEFAULT_GOAL := help
.PHONY: help serve test test-long check format docs bench clean
.DELETE_ON_ERROR:

help: ## show this
	@echo 'usage: make TARGET [PYTHON=/path/to/python3.11] [ARGS="..."]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-9s %s\n", $$1, $$2 }' Makefile

serve: $(VENV)/.installed ## serve MODEL on HOST:PORT; further flags in ARGS
	@exec $(PY) -m paceline serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

test: $(VENV)/.installed-dev ## run the tests, with the default model; pytest's flags in ARGS
	@$(PY) -m paceline models pull smollm2-135m-instruct >/dev/null
	@$(PY) -m pytest $(ARGS)

test-long: $(VENV)/.installed-dev ## the tests that take minutes; results in benchmarks/results/long.json
	@$(PY) -m paceline models pull smollm2-135m-instruct >/dev/null
	@$(PY) -m pytest -m long tests/long $(ARGS)

check: $(VENV)/.installed-dev ## lint, format, types, import rules
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/.installed-dev ## apply the formatter and the fixes it is sure of
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(VENV)/.installed-dev ## write docs/settings.md anew from the dataclasses
	$(PY) docs/make_settings.py

bench: $(VENV)/.installed-bench ## compare with llama.cpp, about ten minutes to build it; flags in ARGS
	$(PY) benchmarks/vs_llamacpp.py $(ARGS)

clean: ## remove the environment and every cache in this folder; models stay in theirs
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, in layers. torch comes first and alone: whatever is installed later finds it there
# and leaves it, so no other build of it (with CUDA's gigabytes) is pulled.

$(VENV)/.created:
	@set -e; found=; \
	for python in "$(PYTHON)" python3.11 python3 python3.12 python3.13 python3.14; do \
	    [ -n "$$python" ] || continue; \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	    [ "$$python" != "$(PYTHON)" ] || { echo "make: PYTHON=$$python is not a Python of 3.11 or newer" >&2; exit 1; }; \
	done; \
	[ -n "$$found" ] || { echo 'make: no Python of 3.11 or newer found; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }; \
	"$$found" -c 'import sys; print("making $(VENV) with Python %d.%d" % sys.version_info[:2]); sys.version_info[:2] == (3, 11) or print("note: tested with Python 3.11; on another one pip may pick a torch that brings CUDA", file=sys.stderr)'; \
	rm -rf $(VENV); \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); echo "make: $$found cannot make virtual environments; on Debian and Ubuntu that is the package python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.created Makefile
	@echo 'installing $(TORCH)'
	@$(PY) -m pip install '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo 'installing paceline'
	@$(PY) -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	@echo 'installing paceline and what its tests need'
	@$(PY) -m pip install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed
	CMAKE_ARGS='-DGGML_NATIVE=ON' $(PY) -m pip install llama-cpp-python==0.3.36
	@touch $@
