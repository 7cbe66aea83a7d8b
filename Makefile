# Every target makes its own environment first (scripts/bootstrap.sh: the first time minutes, then a moment).
SHELL := /bin/bash
PYTHON := .venv/bin/python
INFLIGHT := .venv/bin/inflight
# Where clones share what is costly to make; as in scripts/bootstrap.py.
CACHE := $(or $(INFLIGHT_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inflight)
# Images of containers often set it; then each of the thousand processes of the tests compiles what it imports of us.
unexport PYTHONDONTWRITEBYTECODE
# Extra arguments for "inflight run", for instance: make demo RUN="--set spec.algorithm.steps=120"
RUN ?=
# Extra arguments for pytest, for instance: make test-unit PYTEST="-k ledger -x"
PYTEST ?=
# Extra arguments for "make node", for instance: make node NODE="--image operator.tar"
NODE ?=
RANKS := tests/integration/trainer/test_fsdp2.py tests/integration/trainer/test_deepspeed.py tests/integration/trainer/test_faults.py \
         tests/integration/runs/test_ranks.py tests/integration/runs/test_ranks_vllm.py tests/integration/runs/test_rank_exits.py
RANKS_KILLED := tests/integration/runs/test_ranks_killed.py

.DEFAULT_GOAL := help
.PHONY: help bootstrap demo demo-check demo-smollm2 demo-smollm2-short test lint typecheck test-unit test-integration test-ranks test-ranks-killed test-control-plane \
        control-plane node test-cluster images test-image bench bench-trainer bench-operator bench-cluster lock fmt clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

bootstrap: ## Make .venv from the locked requirements
	@scripts/bootstrap.sh

demo: bootstrap ## Train a tiny model to sort letters with two vLLM servers (about two minutes)
	@$(PYTHON) examples/sort-letters/make_model.py
	@$(INFLIGHT) run examples/sort-letters/job.yaml $(RUN)

demo-smollm2: bootstrap ## Train SmolLM2-135M to answer sums (about five minutes)
	@$(PYTHON) examples/smollm2-arithmetic/make_model.py
	@$(INFLIGHT) run examples/smollm2-arithmetic/job.yaml $(RUN)

demo-check: demo ## The demo, and whether it has learned
	@$(PYTHON) scripts/check_learning.py runs/latest exact --first 10 --at-most 0.25 --last 30 --at-least 0.75

demo-smollm2-short: RUN = --set spec.algorithm.steps=3
demo-smollm2-short: demo-smollm2 ## Three steps of demo-smollm2, for CI

test: ## Lint, types, unit and integration tests; prints the time of each
	@scripts/stages.sh bootstrap lint typecheck test-unit test-integration

lint: bootstrap ## Check style and format
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .

typecheck: bootstrap ## mypy, strict
	@MYPY_CACHE_DIR="$(CACHE)/mypy" $(PYTHON) -m mypy

test-unit: bootstrap ## Fast tests, no server
	@$(PYTHON) -m pytest tests/unit -n 3 $(PYTEST)

test-integration: bootstrap ## Tests with real processes, one file at a time on each of two workers
	@$(PYTHON) -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder $(patsubst %,--ignore=%,$(RANKS) $(RANKS_KILLED)) $(PYTEST)

test-ranks: bootstrap ## Trainers of several ranks: the engines fsdp2 and deepspeed, and whole runs with each
	@$(PYTHON) -m pytest $(RANKS) -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-ranks-killed: bootstrap ## A rank is killed at ten random moments of a run, with each engine (some ten minutes)
	@$(PYTHON) -m pytest $(RANKS_KILLED) -s $(PYTEST)

test-control-plane: bootstrap ## Tests against a real Kubernetes API server (compiles it the first time: five minutes, needs Go)
	@PYTHONPATH=tests $(PYTHON) -m control_plane.cluster --build-only --also helm
	@$(PYTHON) -m pytest tests/control_plane -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST)

control-plane: bootstrap ## Leave a Kubernetes control plane with JobSet and fake nodes up, until Ctrl-C
	@PYTHONPATH=tests $(PYTHON) -m control_plane.cluster

node: bootstrap ## Make this machine a Kubernetes node until Ctrl-C: real pods in containers (needs root)
	@PYTHONPATH=tests $(PYTHON) -m cluster.node $(NODE)

test-cluster: bootstrap ## Tests on a real Kubernetes node, this machine (needs root; builds the images first)
	@PYTHONPATH=tests $(PYTHON) -m cluster.node --build-only
	@PYTHONPATH=tests $(PYTHON) -m cluster.images
	@$(PYTHON) -m pytest tests/cluster $(PYTEST)

images: bootstrap ## Build the images by buildah (the first time ten minutes, needs root)
	@PYTHONPATH=tests $(PYTHON) -m cluster.images

test-image: bootstrap ## Build the images; look into them, and train in the one of the runtime
	@PYTHONPATH=tests $(PYTHON) -m cluster.images
	@$(PYTHON) -m pytest tests/cluster/test_images.py $(PYTEST)

bench: bootstrap ## Measure real runs, about six minutes; prints one JSON (BENCH=--quick: two minutes)
	@$(PYTHON) benchmarks/run.py $(BENCH)

bench-trainer: bootstrap ## Measure the trainer's engines against each other, about ten minutes; prints one JSON
	@$(PYTHON) benchmarks/trainer_engines.py $(BENCH)

bench-operator: bootstrap ## Measure the operator on a control plane of its own, about ten minutes; prints one JSON
	@PYTHONPATH=tests $(PYTHON) -m control_plane.cluster --build-only >&2
	@$(PYTHON) benchmarks/operator_load.py $(BENCH)

bench-cluster: bootstrap ## Measure the example's start on a real node, from apply to the first step (needs root); prints one JSON
	@PYTHONPATH=tests $(PYTHON) -m cluster.node --build-only >&2
	@$(PYTHON) benchmarks/cluster_start.py $(BENCH)

lock: ## Resolve the requirements again (UPGRADE="--upgrade" moves versions)
	@scripts/lock.sh $(UPGRADE)

fmt: bootstrap ## Format and mend what can be mended
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

clean: ## Remove .venv, caches, runs and made models from this clone (the shared cache stays)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist runs examples/*/model
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
