# The five things that people do.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup lint test docs benchmarks

setup:  # an environment with everything; compiles two dependencies of PyGCL, once
	$(PYTHON) -c "import sys; sys.exit('dgl 1.1.3 needs Python 3.11 or older: make setup PYTHON=python3.11' if sys.version_info >= (3, 12) else 0)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0 wheel setuptools ninja
	$(BIN)/pip install --no-build-isolation torch-scatter torch-sparse
	$(BIN)/pip install -e '.[dev,docs,pyg,dgl,pygcl]'

lint:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test:
	$(BIN)/python -m pytest -n auto --dist worksteal

docs:  # into docs/_build
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build

benchmarks:
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.plot
