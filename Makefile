# Two commands: `make demo` shows what it does, `make test` proves it. Both set up .venv first.
# `make test CONSTRAINTS=constraints-newest.txt` tests with other versions, in an environment of their own, .venv-newest;
# `make versions CONSTRAINTS=...` only what depends on versions.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TESTS ?=
VENV := .venv$(patsubst constraints%.txt,%,$(CONSTRAINTS))
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
export PYTHONDONTWRITEBYTECODE =  # tests start many processes
SOURCES = $(VENV)/bin/python pyproject.toml $(CONSTRAINTS) hatch_build.py $(wildcard penstock/cpu/native/*.h penstock/*/cpu/native/*.[ch])

.PHONY: demo test versions lint site wheels check-wheels try-wheel release clean

demo: $(VENV)/demo
	$(VENV)/bin/penstock demo

test: $(VENV)/dev $(if $(filter .venv,$(VENV)),lint)
	$(VENV)/bin/python -m pytest -n auto --dist worksteal -m "not slow" $(TESTS)

# What depends on the versions of torch, Triton, transformers, NumPy, FastAPI, openai and anthropic.
versions: TESTS = tests/call/test_private.py tests/compat/test_transformers.py tests/compat/test_transformers_delta.py tests/gpu \
	tests/integrations/test_transformers.py tests/layers/test_convolution.py tests/models/test_huggingface.py tests/recurrence/test_triton.py \
	tests/server/test_chat.py tests/server/test_completions.py tests/server/test_messages.py tests/server/test_templates.py tests/tune/test_resources.py
versions: test

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --config-file tests/gpu_device/mypy.ini tests/gpu_device  # names that only a GPU's run would miss
	$(VENV)/bin/lint-imports

# The source archive and a wheel for each platform of hatch_build.py, in dist/. The first time, Zig compiles its libraries for each.
wheels: .venv-wheels/ready
	rm -rf dist
	.venv-wheels/bin/python -m release.wheels dist

# Their contents, metadata, symbols and sizes; the wheel of this machine is built again, and must have equal bytes.
check-wheels: .venv-wheels/ready
	.venv-wheels/bin/python -m release.check dist

# The wheel of this machine in a fresh environment without a compiler and Triton.
try-wheel: .venv-wheels/ready
	.venv-wheels/bin/python -m release.try_wheel dist

# Builds and checks a release of this commit, writes its bill of materials, and tags it. Publishes nothing.
release: .venv-wheels/ready
	.venv-wheels/bin/python -m release.tag --check
	$(MAKE) test
	$(MAKE) wheels
	$(MAKE) check-wheels
	$(MAKE) try-wheel
	.venv-wheels/bin/python -m release.bill dist
	.venv-wheels/bin/python -m release.tag dist

.venv-wheels/ready: release/requirements.txt release/checks.txt
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes -r release/requirements.txt -r release/checks.txt
	touch $@

# The documentation as a site: open build/site/index.html. Search included, it needs no web server.
site: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: $(SOURCES)
	$(PIP) install --quiet -c $(CONSTRAINTS) -e ".[demo]"
	touch $@

$(VENV)/dev: $(SOURCES)
	$(PIP) install --quiet -c $(CONSTRAINTS) -e ".[$(if $(filter .venv,$(VENV)),dev,test)]"
	touch $@

clean:
	rm -rf .venv .venv-* build dist penstock/cpu/native/*.so penstock/cpu/native/*.dylib penstock/cpu/native/*.dll
