# Every target sets itself up in .venv of this checkout; PYTHON is any Python from 3.11 on.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CHECKED := fxshard examples benchmarks

.PHONY: setup demo test test-all lint links style types pictures bench gpu-check clean

setup: $(READY)

# torch comes first and alone, by its exact version: resolved together with the rest, pip may take a build of gigabytes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
	@echo "$(BIN) has what it takes: $(BIN)/python, $(BIN)/fxshard"

demo: $(READY)
	$(BIN)/python -m examples.demo

# Two workers of one thread each: most of the time is spent in Python, and sums have one order.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: lint
	$(PYTEST) -m "not full"

test-all: lint
	$(PYTEST)

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package as it is installed, as links: for type checkers, which do not see that passes/ is fxshard.passes, and for a
# Python into which nothing may be installed.
links:
	@rm -rf build/links && mkdir -p build/links/fxshard
	@ln -s $(CURDIR)/fxshard/* $(CURDIR)/passes $(CURDIR)/runtime $(CURDIR)/viz build/links/fxshard
	@ln -s $(CURDIR)/examples $(CURDIR)/benchmarks build/links

types: $(READY) links
	cd build/links && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
		$(addprefix -p ,$(CHECKED))

pictures: $(READY)
	$(BIN)/python -m examples.pictures

# Alone on the machine: an hour or more, and root for links of a limited rate. NAMES: some cases only.
bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.suite $(NAMES)

# On a GPU machine PYTHON has torch and nothing is downloaded; a Python without torch gets the checkout's own .venv.
gpu-check: links
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory --silent setup && python=$(CURDIR)/$(BIN)/python; fi && \
	cd build/links && $$python -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info
