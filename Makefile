# What a newcomer needs: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for something, so that more of them run at once than there are cores. On Slurm, each process has its own stack.
PYTEST = $(BIN)/python -m pytest --tb=native --numprocesses
INTO ?= site-versions
export RAYSLURM_MODE ?= local
# Without bytecode, each process of the tests would compile them and the package anew.
export PYTHONDONTWRITEBYTECODE :=
export DAGSTER_HOME ?= $(CURDIR)/.dagster_home

.PHONY: help install demo deploy dev test test-local test-stack test-all lint docs docs-links docs-version docs-screenshots bench stack-up stack-down stack-logs clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml scripts/make_venv.py
	@$(PYTHON) scripts/make_venv.py $(VENV)
	@echo "installing into $(VENV) (Ray and Dagster are large: a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

$(VENV)/.with-examples: $(VENV)/.installed
	@echo "installing PyTorch for the examples into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[examples]"
	@touch $@

install: $(VENV)/.installed  ## set up .venv

demo: install  ## materialize the example study here, with progress and a table of results
	@$(BIN)/python -m example_project.demo

deploy: install  ## make the example's environment on the cluster that SLURM_EDGE_NODE_… names
	@RAYSLURM_MODE=slurm $(BIN)/rayslurm env --from example_project.definitions:compute push

dev: install  ## open the example in `dagster dev`
	@mkdir -p "$(DAGSTER_HOME)"
	@$(BIN)/dagster dev -m example_project.definitions

lint: install  ## formatting, lint, types, direction of imports, and the oldest Python of the runtime (3.8) and of the edge node (3.6)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/vermin --quiet --no-tips --eval-annotations --target=3.8- --violations dagster_rayslurm/runtime
	@$(BIN)/vermin --quiet --no-tips --target=3.6- --violations dagster_rayslurm/edge dagster_rayslurm/runtime/node/interfaces.py

test: install  ## lint, types, and the tests that need nothing but Python
	@$(MAKE) --no-print-directory --jobs=2 lint test-local

test-local: install
	@$(PYTEST) 4 -m "not stack and not core and not thorough"

test-stack: stack-up  ## the core of the tests on the Slurm stack, which needs Docker
	@CI=true $(PYTEST) 3 -m core

test-all: lint stack-up $(VENV)/.with-examples  ## every test, also those that repeat others in further modes and variants
	@CI=true $(PYTEST) 3

stack-up: install  ## start a small Slurm cluster in containers, or bring it up to date
	@$(BIN)/python -m stack up

stack-down: install  ## remove it, with all that it holds
	@$(BIN)/python -m stack down

stack-logs: install  ## print what its services say
	@$(BIN)/python -m stack logs

docs: install  ## build the documentation site into site/
	@$(BIN)/python scripts/configuration.py > docs/configuration.md
	@$(BIN)/python scripts/commands.py > docs/reference/command-line.md
	@$(BIN)/python scripts/messages.py > docs/reference/messages.md
	@$(BIN)/zensical build --strict

docs-links: docs  ## check the links of the built site: its own, and over the network those to elsewhere
	@$(BIN)/python scripts/docs_links.py site

docs-version: install  ## build the site of VERSION=x.y into site-versions/, beside those of other versions
	@$(BIN)/python scripts/docs_version.py "$(VERSION)" "$(INTO)"

docs-screenshots: stack-up  ## renew the pictures of the UIs in docs/images, which needs Chromium and Docker
	@$(BIN)/python scripts/screenshots.py

bench: install  ## measure on the stack, beside doing it by hand and beside others, and render docs/benchmarks.md (40 minutes)
	@$(BIN)/python -m stack up
	@$(BIN)/python -m benchmarks run --into "benchmarks/results/$$(date -u +%F).json" --report

clean:  ## remove .venv and what the example left in this directory
	rm -rf $(VENV) .dagster_home .pytest_cache .mypy_cache .ruff_cache .cache site site-versions
