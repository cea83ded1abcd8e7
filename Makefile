# Two commands: `make demo` shows what it does, `make test` proves it. Both set up .venv first.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check

.PHONY: demo test lint clean

demo: .venv/demo
	.venv/bin/penstock demo

test: .venv/dev lint
	.venv/bin/python -m pytest -n auto -m "not slow"

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt hatch_build.py $(wildcard penstock/recurrence/cpu/native/*.[ch])
	$(PIP) install --quiet -c constraints.txt -e ".[demo]"
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt hatch_build.py $(wildcard penstock/recurrence/cpu/native/*.[ch])
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist penstock/recurrence/cpu/native/*.so
