# What people do, each by one word. All but benchmarks make the environment that they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup lint check test docs ci benchmarks

setup:  # an environment with everything; compiles two dependencies of PyGCL, once
	$(PYTHON) -c "import sys; sys.exit('dgl 1.1.3 needs Python 3.11 or older: make setup PYTHON=python3.11' if sys.version_info >= (3, 12) else 0)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0 wheel setuptools ninja
	$(BIN)/pip install --no-build-isolation torch-scatter torch-sparse
	$(BIN)/pip install -e '.[dev,docs,pygcl]'

.venv/%: setup.cfg  # a file for each extra that is there; torch first, as any that is there will do
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install torch==2.13.0
	$(BIN)/pip install --quiet -e '.[$*]'
	touch $@

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint  # about three minutes on two cores: before a pull request
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow" tests/core

test: setup  # all of them, with the real frameworks
	$(BIN)/python -m pytest -n auto --dist worksteal

docs: .venv/docs  # into docs/_build
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build

ci:  # everything, from nothing, as a release does it
	.ci/run

benchmarks:
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.scripts
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.counts
	$(BIN)/python -m benchmarks.grace
	$(BIN)/python -m benchmarks.libraries
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.plot
