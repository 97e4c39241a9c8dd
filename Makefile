# Every target sets up what it needs first; all of it stays in .local/ inside the clone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# A version manager's python3 fails where it has no 3.13; any Python will do to begin with, see local/install.py.
PYTHON ?= $(shell python3 -c "" 2>/dev/null && echo python3 || echo /usr/bin/python3)
DEV := .local/venvs/dev/bin
LOCAL := $(DEV)/python -m local
SAM := .local/venvs/sam/bin/sam
# A check must not depend on the developer's AWS account or on what the caller's shell exports for Python.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export SAM_CLI_TELEMETRY := 0
export BACKBURNER_PYTHON ?= $(CURDIR)/$(DEV)/python
export BACKBURNER_CACHE ?= $(CURDIR)/.local/cache/layers

CODE := $(wildcard functions layers cli local tests bench docs/examples)
MACHINE := $(shell uname -m)
HOST_ARCHITECTURE := $(if $(filter Linux,$(shell uname -s)),$(if $(filter arm64 aarch64,$(MACHINE)),arm64,x86_64),host)

.PHONY: help setup up down logs status demo test check checkov e2e simulate simulate-mutants chaos bench bench-limits bench-limits-simulated bench-accept bench-accept-cpu bench-bill bench-telling bench-imports bench-peers bench-growth bench-worker layers openapi build lock clean bench-slack

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-23s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## install everything that the other targets need, into .local/
	@$(PYTHON) -m local.install

# The same without a word when there is nothing to do.
.PHONY: ready
ready:
	@$(PYTHON) -m local.install --quiet

up: ready ## start the local AWS and a small model, deploy template.yaml to it (OPENAI_BASE_URL=... for another provider)
	@$(LOCAL) up

down: ready ## end what `make up` started
	@$(LOCAL) down

logs: ready ## show the logs of functions, local AWS and model (ARGS=-f to follow)
	@$(LOCAL) logs $(ARGS)

status: ready ## say what is running and where
	@$(LOCAL) status

demo: ready ## bring the stack up and watch one job from submission to answer
	@$(LOCAL) demo

test: ready layers ## run all tests that need no deployed stack (ARGS=... for pytest)
	@$(DEV)/python -m pytest tests -m "not e2e" -n auto $(ARGS)

check: ready ## run all static checks: style, types, import contract, template
	@failed=(); run() { echo "check: $$1"; shift; "$$@" || failed+=("$$*"); }; \
	run style $(DEV)/ruff check --quiet $(CODE); \
	run format $(DEV)/ruff format --check --quiet $(CODE); \
	run types $(DEV)/mypy --no-error-summary $(CODE); \
	run imports $(DEV)/lint-imports --no-logo; \
	run template $(DEV)/cfn-lint template.yaml; \
	run "template by SAM" env AWS_DEFAULT_REGION=us-east-1 $(SAM) validate --lint --template template.yaml; \
	run "template rules" $(DEV)/python -m pytest -q -n auto tests/template; \
	for command in "$${failed[@]}"; do echo "check: FAILED $$command"; done; \
	test "$${#failed[@]}" -eq 0

checkov: ## look at the template with checkov; it is installed when first asked for (300 MB)
	@$(PYTHON) -m local.install --quiet --also checkov
	@.local/venvs/checkov/bin/checkov --config-file .checkov.yaml

e2e: ready ## deploy to a local AWS of its own with a fake provider, and test it over HTTP (ARGS=... for pytest)
	@$(LOCAL) e2e $(ARGS)

SEEDS ?= 20000
simulate: ready ## run the core under every misfortune (SEEDS=100000 for more, REPLAY=n for one history)
	@PYTHONPATH=layers/shared $(DEV)/python -m tests.simulation --seeds $(SEEDS) $(if $(REPLAY),--replay $(REPLAY))

simulate-mutants: ready ## break the core on purpose, one way at a time, and see each break caught
	@$(DEV)/python -m tests.simulation.mutants

chaos: ready ## kill workers at random on a local stack of its own, and count what was lost or paid for twice
	@$(LOCAL) bench chaos $(ARGS)

BENCHES := accept-cpu imports bill worker telling slack limits limits-simulated growth
bench: ready layers ## run every bench but the comparison with others; 80 minutes
	@for name in $(BENCHES); do echo "=== bench-$$name"; $(MAKE) bench-$$name; done

bench-limits: ready ## measure how much of a provider's limit is used, next to the ideal; 20 minutes (ARGS="--runs 1 --scenario exact")
	@PYTHONPATH=layers/shared $(DEV)/python -m bench.limits $(ARGS)

bench-limits-simulated: ready ## the same for 100,000 jobs and 50 workers, on virtual time (ARGS="--scenario fair --jobs 5000")
	@PYTHONPATH=layers/shared $(DEV)/python -m bench.limits_simulated $(ARGS)

RATE ?= 20
SECONDS ?= 15
bench-accept: ready ## measure how fast the running local stack accepts jobs (RATE=20 SECONDS=15)
	@$(DEV)/python -m bench.accept --rate $(RATE) --seconds $(SECONDS)

bench-accept-cpu: ready layers ## measure what accepting a job costs, next to a bare handler (ARGS="--blocks 15 --requests 100")
	@$(DEV)/python -m bench.accept_cpu $(ARGS)

bench-telling: ready ## measure how soon the news of a job's end arrives (ARGS="--rate 10 --seconds 30")
	@$(LOCAL) bench telling $(ARGS)

bench-slack: ready ## measure a support bot's load in Slack on a stack of its own (ARGS="--per-minute 60 --minutes 3")
	@$(LOCAL) bench slack $(ARGS)

bench-peers: ready ## run what users would pick instead, and Backburner, side by side; an hour (ARGS="--scenario cpu --runs 3")
	@$(PYTHON) -m local.install --quiet --also bench
	@$(DEV)/python -m bench.peers --json docs/benchmarks/peers.json $(ARGS)
	@$(LOCAL) bench peers --json docs/benchmarks/peers.json $(ARGS) --peer backburner
	@.local/venvs/bench/bin/python -m bench.peers.report

bench-growth: ready ## measure whether anything becomes dearer as jobs pile up (ARGS="--sizes 100 1000")
	@$(LOCAL) bench growth $(ARGS)

bench-worker: ready ## measure what a worker adds to the provider's time, in time, CPU and memory (ARGS="--jobs 1000")
	@$(LOCAL) bench worker $(ARGS)

bench-bill: ready ## count what a job asks of AWS, and its price beside a plain implementation's (ARGS="--jobs 100")
	@PYTHONPATH=layers/shared $(DEV)/python -m bench.bill $(ARGS)

bench-imports: ready layers ## measure what a provider adds to its SDK's cold import
	@$(DEV)/python -m bench.cold_import $(ARGS)

# For the tests that look at what is shipped: both layers as the functions of this machine find them.
layers: ready ## build both layers for this machine into .local/layers/
	@for layer in Dependencies:dependencies Providers:dependencies Shared:shared; do \
		ARTIFACTS_DIR="$(CURDIR)/.local/layers/$${layer%%:*}Layer" BACKBURNER_ARCHITECTURE=$(HOST_ARCHITECTURE) \
			$(MAKE) -C "layers/$${layer##*:}" "build-$${layer%%:*}Layer"; \
	done

openapi: ready ## renew docs/openapi.json from the models
	@PYTHONPATH=layers/shared $(DEV)/python -m local.openapi

build: ready ## `sam build` for AWS (arm64; BACKBURNER_ARCHITECTURE=x86_64 for the other)
	@$(SAM) build

lock: ready ## renew the lock files from the .in files (ARGS=--upgrade for newer versions of the rest)
	@$(PYTHON) -m local.install --lock $(ARGS)

clean: ## end the local stack and remove everything that was built or installed
	@if [ -x $(DEV)/python ]; then $(LOCAL) down; fi
	@rm -rf .local .aws-sam .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
