# SPDX-License-Identifier: Apache-2.0
# What each target does is in tools/; this file only gives it a name.

PORT ?= 8000
HOST ?= 127.0.0.1
MODEL ?=
SERVE_FLAGS ?=
PYTEST_WORKERS ?= 2
PART ?=
VENV ?= .venv
export VENV
# Where it is set, each process compiles its sources again, and pytest rewrites the asserts of 260 files each time.
unexport PYTHONDONTWRITEBYTECODE

SYSTEM_PYTHON ?= python3
PYTHON = $(VENV)/bin/python

.PHONY: help serve test test-rest lint format unit e2e emulate-full setup setup-serve peers clean
.DEFAULT_GOAL := help

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "Variables: PORT=$(PORT), HOST=$(HOST), MODEL (default: a small random model), SERVE_FLAGS, PYTEST_WORKERS=$(PYTEST_WORKERS),"
	@echo "           PYTHON, VENV=$(VENV), ACCELERATOR=cpu|cuda, TORCH_CPU_INDEX (see tools/setup_env.py)"

serve: setup-serve ## Serve MODEL on PORT through dsl; sets up what it needs
	$(PYTHON) tools/serve.py --host $(HOST) --port $(PORT) $(if $(MODEL),--model $(MODEL)) -- $(SERVE_FLAGS)

test: SELECTION = not full and not rest
test: lint unit e2e ## Lint, types and the tests that a change waits for: every operator, both SMs, a server

test-rest: SELECTION = rest and not full
test-rest: unit e2e ## The tests that `make test` leaves; PART=2/4 for the second of four parts

setup: peers ## The environment of the checks, in VENV, and their browser where apt can
	@$(SYSTEM_PYTHON) tools/setup_browser.py

setup-serve:
	@$(SYSTEM_PYTHON) tools/setup_env.py serve

peers: ## Others' kernels that the emulator's tests run, in .peers
	@$(SYSTEM_PYTHON) tools/setup_env.py test
	@$(SYSTEM_PYTHON) tools/setup_peers.py

lint: setup ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

SELECTION = not full

# worksteal: a worker has neighbouring tests, which share kernels that its process has compiled, until one has none left.
unit: setup ## Tests that start no server
	$(PYTHON) -m pytest tests -n $(PYTEST_WORKERS) --dist worksteal -m '$(SELECTION)' $(if $(PART),--part $(PART)) --durations=25 --durations-min=4

e2e: setup ## Checks against a real vLLM
	$(PYTHON) -m pytest integration -n $(PYTEST_WORKERS) --dist loadfile -m '$(SELECTION)' $(if $(PART),--part $(PART)) --durations=25 --durations-min=4

emulate-full: setup ## All tests of the emulator and on it, those marked full as well
	$(PYTHON) -m pytest tests/emulator tests/attention tests/experts tests/gemm tests/judge tests/linear tests/norm tests/primitives tests/quant tests/sampling tests/softmax -n $(PYTEST_WORKERS)

load-demo: setup ## dsl beside vLLM's own backend under load: results and a page in results/
	$(PYTHON) -m loadtests.compare --model demo --scenario 128-128 chat-shared-prefix --users 1 4 --scale 0.2 \
		--warm-seconds 2 --window-seconds 8 --rounds 2 -- \
		--max-model-len 2048 --enforce-eager --block-size 32 $(SERVE_FLAGS)

format: setup ## Let ruff fix and format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## Remove the environment and all that was built
	rm -rf $(VENV) .peers .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
