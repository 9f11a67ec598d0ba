# Everything runs inside .venv, which the first target makes. Stamp files in it
# say which groups are installed, so that a second run starts at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
SDKS   := build/sdks-current build/sdks-previous
ARGS   ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help demo test coverage test-sdks check bench soak clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.13 picks the interpreter of a new .venv; ARGS=... is passed on."

demo: $(STAMPS)/package ## the quickstart: the same calls, unthrottled and throttled
	$(BIN)/python examples/quickstart.py $(ARGS)

test: $(STAMPS)/test ## the whole suite
	$(BIN)/python -m pytest --ignore=tests/sdks $(ARGS)

coverage: $(STAMPS)/test ## the whole suite, with branch coverage: three times as long
	$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)

test-sdks: $(SDKS:%=%/stamp) ## the SDKs of OpenAI and Anthropic, this major and the one before
	set -e; for venv in $(SDKS); do $$venv/bin/python -m pytest tests/sdks $(ARGS); done

check: $(STAMPS)/check ## format, lint, types, and a wheel that installs and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(wildcard src tests examples benchmarks)
	rm -rf build/dist build/clean
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/python -m zipfile --list build/dist/*.whl | grep '^tokenflow/py\.typed ' \
		|| { echo "make: the wheel lacks tokenflow/py.typed" >&2; exit 1; }
	$(BIN)/python -m venv build/clean
	build/clean/bin/python -m pip install --quiet build/dist/*.whl
	cd build/clean && bin/python -W error -c "import tokenflow; print('imported', tokenflow.__file__)"
	build/clean/bin/python -m pip install --quiet "$$(echo build/dist/*.whl)[httpx,httpx2]"
	PATH="$(CURDIR)/build/clean/bin:$$PATH" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 \
		$(BIN)/pyright --ignoreexternal --verifytypes tokenflow

bench: $(STAMPS)/bench ## the benchmarks, which write docs/performance.md and docs/simulation.md
	set -e; for script in benchmarks/bench_*.py benchmarks/simulate.py; do $(BIN)/python "$$script" $(ARGS); done

soak: $(STAMPS)/test ## long random runs: nothing leaks
	$(BIN)/python -m tests.soak $(ARGS)

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# pip reads dependency groups since 25.1; a bare machine brings 23.
$(STAMPS)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: tokenflow needs Python 3.11 or newer, and '$(PYTHON)' is not;" \
			"name another one: make PYTHON=python3.13 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import pip; v = pip.__version__.split("."); exit((int(v[0]), int(v[1])) < (25, 1))' \
		|| $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/pip
	$(BIN)/python -m pip install --quiet --editable '.[httpx2]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	$(BIN)/python -m pip install --quiet --group test
	@touch $@

$(STAMPS)/check: $(STAMPS)/test
	$(BIN)/python -m pip install --quiet --group lint --group typing build
	@touch $@

$(STAMPS)/bench: $(STAMPS)/package
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

# Each pair of SDKs in an environment of its own, called as its dependency group.
build/sdks-%/stamp: pyproject.toml $(STAMPS)/pip
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --editable . --group $(notdir $(@D))
	@touch $@
