# What people do, each by one word. All but benchmarks and gpu make the environment that they need.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -q -n auto --dist worksteal
DGL := $(shell $(PYTHON) -c "import sys; print('dgl' if sys.version_info < (3, 12) else '')")

.NOTPARALLEL:
.PHONY: help setup lint format check test test-rest test-all docs ci benchmarks gpu

help:  # this list
	@sed -n 's/^\([a-z-]*\):[^#]*#* *\(.*\)/make \1\t\2/p' $(MAKEFILE_LIST)

.venv/%: setup.cfg pyproject.toml requirements.txt  # a file for each group that is there; torch first, as any that is there will do
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet 'pip >= 25.1'
	$(BIN)/pip install --quiet $(or $(NEEDS),-e . --group $*)
	touch $@

.venv/test: NEEDS = -r requirements.txt --group test
.venv/dgl: NEEDS = -e '.[dgl]'

lint: .venv/lint  # style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/lint  # what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

check: lint .venv/core  # about three minutes on two cores: before a pull request
	$(PYTEST) -m "not slow" tests/core

test: .venv/test $(DGL:%=.venv/%)  # no compiler: the core, PyG, DGL where it has a wheel, pages, examples, trainings
	$(PYTEST) -m "not slow and not pygcl$(if $(DGL),, and not dgl)"
	@echo "Not tested: PyGCL, and what takes long (make test-all compiles for 10 to 60 minutes)$(if $(DGL),,; DGL, which needs Python 3.11)"

setup:  # an environment with everything; compiles two dependencies of PyGCL, once
	@test '$(DGL)' || { echo 'PyGCL needs dgl 1.1.3 and Python 3.11 or older: make $(MAKECMDGOALS) PYTHON=python3.11'; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo 'PyGCL needs torch-scatter and torch-sparse, which need a C++ compiler'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet 'pip >= 25.1' wheel setuptools ninja
	$(BIN)/pip install --quiet -r requirements.txt --group dev --group docs
	$(BIN)/pip install --quiet -e '.[dgl]'
	$(BIN)/pip install --quiet --no-build-isolation torch-scatter torch-sparse PyGCL==0.1.2

test-rest: setup  # what make test leaves out
	$(PYTEST) -m "slow or pygcl"

test-all: setup test test-rest  # both

docs: .venv/docs  # into docs/_build
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build
	$(BIN)/python -m docs.programs.check_site docs/_build

ci:  # everything, from nothing, as a release does it
	.ci/run

benchmarks:  # the records of time and memory, and their tables
	$(BIN)/python -m benchmarks.options
	$(BIN)/python -m benchmarks.scripts
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.nodes
	$(BIN)/python -m benchmarks.heads
	$(BIN)/python -m benchmarks.libraries
	$(BIN)/python -m benchmarks.tables

gpu:  # on a GPU, with the torch of .venv: the tests of the core, and the benchmark of ten minutes
	@$(BIN)/python -c 'import pytest, hypothesis, torch; assert torch.cuda.is_available()' 2>/dev/null || { \
		echo "$(BIN)/python needs a torch that sees the GPU (https://pytorch.org/get-started/locally/), and then: pip install 'pip >= 25.1' && pip install -r requirements.txt --group dev"; exit 1; }
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not slow" -rs --device cuda tests/core; tested=$$?; \
		$(BIN)/python -m benchmarks.gpu && exit $$tested
