# Each target creates the environment .venv when it is missing or out of date; nothing has to be set up before.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Without the constraint a dependency may replace torch by a newer build with gigabytes of CUDA packages.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(INSTALL_OPTIONS)
EXTRAS := dev
# Else every process that a test starts compiles torch's own source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo install doors test test-slow test-kernels test-all test-install docs fuzz fuzz-api fuzz-loops fuzz-files soak lint format clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: $(STAMP)  ## Fit a function beside L-BFGS and Adam, solve an equation, train on the digits; opens a page
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

test: $(STAMP)  ## Check format and lint, then types while the tests that take seconds run
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy & types=$$!; \
	$(BIN)/pytest -m "not slow" --numprocesses auto --maxprocesses 4 --dist worksteal; tests=$$?; \
	wait $$types && exit $$tests

test-slow: $(STAMP)  ## Run the tests marked slow, two at a time, those that take gigabytes one by one
	$(BIN)/pytest -m slow --numprocesses auto --maxprocesses 2 --dist loadgroup \
		$$(grep -lE "mark.slow|every_count" tests/test_*.py)

test-kernels: $(STAMP)  ## Run each test function with bounds on rounding errors at least once, with other matrix kernels
	$(BIN)/pytest --other-kernels -m "not slow" --numprocesses auto --maxprocesses 4 --dist worksteal

test-all: test test-kernels test-slow  ## All of them: what CI runs

test-install: $(STAMP)  ## Install the wheel with torch alone, the lowest and the newest allowed, and run the first example
	$(BIN)/python -m tests.install.wheel $(INSTALLS)

install:  ## Install what every target needs, in a single call where there is no environment yet
	test -e $(STAMP) || { $(MAKE) $(STAMP) EXTRAS=dev,doors,docs && touch .venv/.doors .venv/.docs; }
	$(MAKE) .venv/.doors .venv/.docs

doors: .venv/.doors  ## Install Lightning, skorch, transformers, accelerate and PINA; without them their tests are skipped

docs: .venv/.docs  ## Build the documentation site into site/, strictly: a broken link or name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: fuzz-api fuzz-loops fuzz-files  ## Look for wrong steps and for damaged files that are taken for good ones

fuzz-api: $(STAMP)  ## Compare 10,000 random problems with a dense reference (about ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.api --count 10000 --seed 0

fuzz-loops: $(STAMP)  ## Compare the steps of 2,000 random training loops with dense ones (three minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz.loops --count 2000 --seed 0

fuzz-files: $(STAMP)  ## Damage data, checkpoint, configuration and record files byte by byte, 5,000 times
	$(BIN)/python -m tests.fuzz.files --count 5000 --seed 0

soak: $(STAMP)  ## 50,000 steps with flat memory, and 140 kills of commands and fits with bit-exact resume
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.steps --steps 50000
	$(BIN)/python -m tests.soak.kill --kills 100 --fit-kills 40 --seed 0

lint: $(STAMP)  ## Check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite the source in the project's format and fix what lint can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## Delete the environment, the caches and the build outputs (runs/ is kept)
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt requirements-peers.txt
	@echo "Installing into .venv (once; a few minutes) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable ".[$(EXTRAS)]"
	$(INSTALL) --no-deps --requirement requirements-peers.txt
	@touch $@

.venv/.docs: $(STAMP)
	$(INSTALL) --editable ".[docs]"
	@touch $@

.venv/.doors: $(STAMP)
	$(INSTALL) --editable ".[doors]"
	@touch $@
