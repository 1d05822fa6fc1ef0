# The README's two commands are `make demo` and `make test`; both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test suite test-slow test-integrations lint types bench docs clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev,docs]"
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|pip|mypyc)/' $(VENV)/lib || true  # on all cores: pip takes one; a template that is no Python is no fault
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

# Types are checked beside the tests, which often wait for processes and leave a core idle.
test: lint
	$(MAKE) --no-print-directory -j 2 types suite

# Bytecode is kept, whatever the environment says: tests start processes, and each would compile everything again.
suite: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

# By hand: scvi-tools, JAX and pyarrow are heavy (2.7 GB, ten minutes), so that they have a room of their own.
test-integrations:
	test -x $(VENV)-integrations/bin/python || $(PYTHON) -m venv $(VENV)-integrations
	$(VENV)-integrations/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,scvi,jax]" numpyro flax blackjax pythae pyarrow
	DOHYO_INTEGRATIONS=all OMP_NUM_THREADS=1 $(VENV)-integrations/bin/python -m pytest -q tests/integrations tests/test_files.py::test_parquet

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.efficiency
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.stratified
	$(BIN)/python -m benchmarks.import_time

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

clean:
	rm -rf $(VENV) $(VENV)-integrations docs/_build demo tutorial .mypy_cache .pytest_cache .ruff_cache .hypothesis
