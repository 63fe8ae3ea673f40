# `make demo` trains a real agent end to end; `make test` runs the fast tests; `make test-all` is what CI runs.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: demo test test-all test-claweval test-qwenclaw lint docs check software
.DEFAULT_GOAL := demo

demo: .venv/ready
	$(BIN)/snakemake demo

test: .venv/ready
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/ready lint software
	$(BIN)/python -m pytest

# CLAWEVAL=DIR make test-claweval, QWENCLAW=DIR make test-qwenclaw: read a real checkout whole, and run the tasks that
# are scored offline with an agent that does nothing. Without DIR they run on the tests' stand-ins.
test-claweval test-qwenclaw: test-%: .venv/ready
	$(BIN)/snakemake software_tasks_claweval
	$(BIN)/openforge tasks check --no-agents $(or $($(shell echo $* | tr a-z A-Z)),tests/environments/samples/$*_checkout)
	$(BIN)/python -m pytest tests/environments/test_published_tasks.py -k $*

software: .venv/ready
	$(BIN)/snakemake software

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/python tests/imports.py
	$(BIN)/openforge docs --check

docs: .venv/ready
	$(BIN)/openforge docs

check:
	@$(PYTHON) openforge/machine.py

.venv/ready: envs/core.txt pyproject.toml | check
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps -r envs/core.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch .venv/ready
