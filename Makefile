# Every target sets up .venv by itself, once; `make help` lists them.
# Another Python: make PYTHON=/path/to/python3.12 test

BIN := .venv/bin
export PYTHON
# Where the shell forbids Python to keep what it has compiled, every process of the tests would
# compile torch and transformers anew: ten seconds each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types default-tests fix slow gpu browser engines clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv, or bring it up to date
	@tools/setup_env.sh

demo: setup ## watch the default target answer without and with its head
	@$(BIN)/fledge demo

# One process more than there are cores: many tests wait for programs they have started.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))

# mypy keeps one core busy for half a minute; the others need not wait for it.
test: lint ## check and the default tests, a process per core and one more
	@$(MAKE) --no-print-directory --jobs=2 types default-tests

check: lint types ## lint, format, layers, types

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: setup
	@$(BIN)/mypy

default-tests: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

fix: setup ## let ruff repair and format what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

slow: setup ## tests with big downloads or long computations
	@$(BIN)/python -m pytest -m slow

gpu: setup ## tests and measurements that need a CUDA device
	@$(BIN)/python -m pytest -m gpu -n 4
	@tools/gpu_benchmarks.sh

engines: setup ## exported heads in vLLM, llama.cpp and OpenVINO, on the CPU
	@tools/engine_environments.sh
	@$(BIN)/python -m pytest -m engines tests/engines

browser: setup ## Chromium and Playwright, for the tests of the server's page
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[browser]'
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } || \
		{ echo "error: install Chromium with your system's package manager." >&2; exit 1; }

clean: ## remove caches and build leftovers
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .engines
	@rm -rf .venv .engines src/*.egg-info
