# `make run` and `make test` work on a bare Debian or Ubuntu machine with Python >= 3.10.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run demo test quick soak check bench-check docs site packages clean

run: $(VENV)/.installed  ## the daemon on this machine's GPUs; without any, the demo
	@if $(BIN)/python -c 'from gpumond.commands.serve import choose_source; choose_source("auto")' 2>/dev/null; \
	  then exec $(BIN)/gpumond serve; else exec $(BIN)/gpumond demo; fi

demo: $(VENV)/.installed  ## the daemon on a simulated device with programs on it
	@exec $(BIN)/gpumond demo

test: $(VENV)/.installed  ## every test that this machine can run; it says which it skips, and why
	$(BIN)/python -m pytest -q -rs -n 6 --dist loadfile --no-loadscope-reorder -m "not gpu and not soak"

QUICK := facts tick diagnosis flush baselines metrics recordings config top alerts rules simulator

quick: $(VENV)/.installed  ## tests of what is computed, without processes and browser, in less than a minute
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not soak and not slow" $(QUICK:%=tests/%)

soak: $(VENV)/.installed  ## what takes too long, or too many ports, for every change
	$(BIN)/python -m pytest -q -rs -m soak

check: $(VENV)/.installed  ## style, types and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

bench-check: $(VENV)/.installed  ## instructions of the paths that run every second, and memory, against the recorded ones; needs valgrind
	$(BIN)/python -m bench.instructions --check
	$(BIN)/python -m bench.footprint --check

docs: $(VENV)/.installed  ## pages that derive from the code, metrics that a test expects, figures of the benchmarks
	for page in commands configuration metrics plugins responses rules verdicts; do $(BIN)/python -m tools.docs.$$page > docs/reference/$$page.md || exit 1; done
	$(BIN)/python -m tools.docs.man > deploy/man/gpumond.1
	$(BIN)/python -m tools.docs.alerts
	$(BIN)/python -m tools.docs.shares > gpumond/page/meanings.js
	$(BIN)/python -m tests.metrics.test_metrics
	$(BIN)/python -m tools.docs.figures
	$(BIN)/python -m tools.docs.wording

site: $(VENV)/.installed  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

packages: $(VENV)/.installed  ## the Debian and the RPM package, in dist
	PYTHON=$(BIN)/python deploy/packages/build dist

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "gpumond needs Python 3.10 or newer: make run PYTHON=python3.X" >&2; exit 2; }
	@echo "creating $(VENV), about 40 s, once"
	@rm -rf $(VENV); $(PYTHON) -m venv $(VENV) \
	  || { echo "the venv module is missing: apt-get install python3-venv, then again" >&2; exit 2; }
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
