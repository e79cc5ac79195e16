# Every target sets itself up in .venv of this checkout; PYTHON is any Python from 3.11 on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CHECKED := fxshard examples $(if $(wildcard benchmarks/*.py),benchmarks)

.PHONY: setup demo test test-all lint style types pictures gpu-check clean

setup: $(READY)

# torch comes first and alone, by its exact version: resolved together with the rest, pip may take a build of gigabytes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m examples.demo

test: lint
	$(BIN)/python -m pytest -m "not full"

test-all: lint
	$(BIN)/python -m pytest

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not see that passes/ is fxshard.passes, so they get the package as it is installed, as links.
types: $(READY)
	@rm -rf build/types && mkdir -p build/types/fxshard
	@ln -s $(CURDIR)/fxshard/* $(CURDIR)/passes $(CURDIR)/runtime $(CURDIR)/viz build/types/fxshard
	@ln -s $(CURDIR)/examples $(CURDIR)/benchmarks build/types
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
		$(addprefix -p ,$(CHECKED))

pictures: $(READY)
	$(BIN)/python -m examples.pictures

gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) build dist out *.egg-info
