# Everything here runs in .venv, which the first command makes. PYTHON chooses the interpreter that it is made from.
# pip takes its indexes and links from its own configuration or environment (PIP_INDEX_URL, PIP_FIND_LINKS ...).

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help venv demo peers test test-all fresh lint types tests clean
.NOTPARALLEL:

help:
	@echo 'make venv      the environment, in .venv'
	@echo 'make demo      a small model on two ranks: its text, then a table of times, bytes and collectives'
	@echo 'make test      lint, types and tests'
	@echo 'make test-all  the same, with the long tests'
	@echo 'make fresh     demo and test in a clone with an empty environment and home'
	@echo 'make lint      ruff alone'
	@echo 'make peers     environments of the systems that benchmarks compare with, in .peers; takes many minutes'
	@echo 'make clean     removes caches and build output; keeps .venv and .peers'

venv: $(INSTALLED)

# An environment that works is kept, with its interpreter, and brought up to date.
# pip learned to install a pyproject.toml in place in 21.3; what is new enough stays as it is.
# The C++ kernels are built too; without a compiler everything runs, more slowly.
$(INSTALLED): pyproject.toml $(wildcard tp/native/*.py tp/native/src/*)
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet 'pip>=22'
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	-$(BIN)/python -m tp.native.build
	touch $@

demo: venv
	$(BIN)/python -m launch demo

# One that cannot be made does not stop the others; benchmarks list it as a failure, with its reason.
peers:
	PYTHON=$(PYTHON) benchmarks/peers/make.sh

test: lint types tests

test-all: lint types
	$(BIN)/python -m pytest --long

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

# Two files at a time: many tests wait for processes that they start.
tests: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile

fresh:
	tests/fresh.sh

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tp launch tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
