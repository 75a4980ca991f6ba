# Everything a checkout needs: `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEEPSPEED ?= deepspeed==0.19.8
PIP_FLAGS ?=
TEST_FLAGS ?= -n 2 --dist loadfile
MATRIX_FLAGS ?=
DEMO_STEPS ?= 20

ifeq ($(strip $(VENV)),)
PY := $(shell command -v $(PYTHON))
STAMP := build/setup$(subst /,-,$(PY)).stamp
else
PY := $(abspath $(VENV))/bin/python
STAMP := $(abspath $(VENV))/.setup.stamp
endif
# DeepSpeed looks for ninja on PATH when it builds its communication op for CPU.
export PATH := $(dir $(PY)):$(PATH)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

PIP := $(PY) -m pip --quiet install $(PIP_FLAGS)
CODE := $(wildcard ds_fgoffload examples tests benchmarks docs)
TYPED := $(wildcard ds_fgoffload examples)

.PHONY: help setup demo test matrix lint format clean

help: ## list the targets and the variables
	@echo "targets"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "variables (make TARGET NAME=value)"
	@echo "  PYTHON      $(PYTHON): the interpreter that makes the virtual environment"
	@echo "  VENV        $(VENV): where the virtual environment is; empty: none, PYTHON is used as it is"
	@echo "  TORCH       $(TORCH): what pip installs if no torch is there; one that is there stays"
	@echo "  DEEPSPEED   $(DEEPSPEED): the same for DeepSpeed"
	@echo "  PIP_FLAGS   $(PIP_FLAGS): passed to every pip install, e.g. an index with CPU builds of torch"
	@echo "  TEST_FLAGS  $(TEST_FLAGS): passed to pytest"
	@echo "  MATRIX_FLAGS $(MATRIX_FLAGS): passed to tests/matrix.py, such as --only 2.15 or --keep"
	@echo "  DEMO_STEPS  $(DEMO_STEPS): optimizer steps of each of the two runs of the demo"
	@echo
	@echo "in an environment of your own:  make test PYTHON=python VENV="

setup: $(STAMP) ## make the virtual environment, install torch, DeepSpeed and this package with its tests

# What may differ between the machines this has to work on:
# - a torch that the interpreter already has (a GPU machine's) is used, and pinned so that nothing replaces it;
# - DeepSpeed's own build needs torch, so it is built outside pip's isolation, without compiling its ops.
$(STAMP): pyproject.toml Makefile
	@mkdir -p build
	@if [ -n "$(strip $(VENV))" ] && [ ! -x "$(PY)" ]; then \
	    site=; \
	    if $(PYTHON) -c 'import torch' 2>/dev/null; then site=--system-site-packages; fi; \
	    echo "setup: virtual environment in $(VENV) $$site"; \
	    $(PYTHON) -m venv $$site "$(VENV)"; \
	fi
	@echo "setup: build tools"
	@$(PIP) numpy 'setuptools>=77' wheel ninja packaging
	@if ! $(PY) -c 'import torch' 2>/dev/null; then \
	    echo "setup: $(TORCH)"; \
	    $(PIP) '$(TORCH)'; \
	    $(PY) -c 'import sys, torch; sys.exit(bool(torch.version.cuda) and not torch.cuda.is_available())' || printf '%s\n' \
	        "setup: pip took a CUDA build of torch on a machine where torch sees no GPU. It works, but takes gigabytes." \
	        "       For the CPU build: remove $(VENV), then make setup PIP_FLAGS='--index-url ADDRESS' with the" \
	        "       address that PyTorch's install page shows for CPU (add an --extra-index-url for the other packages)."; \
	fi
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > build/constraints.txt
	@if ! $(PY) -c 'from importlib.metadata import version; version("deepspeed")' 2>/dev/null; then \
	    echo "setup: $(DEEPSPEED)"; \
	    DS_BUILD_OPS=0 $(PIP) --no-build-isolation -c build/constraints.txt '$(DEEPSPEED)'; \
	fi
	@echo "setup: ds_fgoffload, in place"
	@$(PIP) --no-build-isolation -c build/constraints.txt --editable '.[test]'
	@command -v ninja > /dev/null || { \
	    echo "setup: no ninja on PATH, and DeepSpeed needs it to build its communication op on CPU; add the folder" \
	         "of $(PY) to PATH, or install ninja with the system's packages" >&2; exit 1; }
	@mkdir -p "$(dir $(STAMP))" && touch "$(STAMP)"

demo: setup ## train a small model with and without offloading, and compare every bit of the result
	@$(PY) examples/byte_lm/demo.py --steps $(DEMO_STEPS)

test: lint ## lint, then the tests
	$(PY) -m pytest $(TEST_FLAGS)

matrix: setup ## the whole suite with the oldest, a middle and the newest pair of torch and DeepSpeed, in fresh environments
	$(PY) -m tests.matrix --pip-flags='$(PIP_FLAGS)' $(MATRIX_FLAGS) -- $(TEST_FLAGS)

lint: setup ## ruff, mypy, import-linter
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy $(TYPED)
	$(dir $(PY))lint-imports

format: setup ## rewrite the code in the project's format
	$(PY) -m ruff format $(CODE)
	$(PY) -m ruff check --fix $(CODE)

clean: ## remove what builds and tests leave; the virtual environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
