# `make help` lists the targets. Everything runs in .venv, which a target makes or renews when it has to.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := "torch>=2.11,<2.14"
.DEFAULT_GOAL := help

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "nightmill needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@# Debian packs venv apart from Python.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "installing python3-venv (Debian)"; apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: a dependency that names a bare `torch` would pull a CUDA build of several GB.
$(VENV)/.worker: pyproject.toml | $(BIN)/python
	@echo "installing nightmill and what it runs on into $(VENV) (about a minute)"
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[worker]"
	@touch $@

$(VENV)/.dev: $(VENV)/.worker
	@echo "installing the development tools into $(VENV)"
	$(BIN)/python -m pip install --quiet --editable ".[worker,bench,dev]"
	@touch $@

.PHONY: setup
setup: $(VENV)/.dev  ## make .venv and install nightmill with everything it needs

.PHONY: demo
demo: $(VENV)/.worker  ## the main job: 64 Parquet prompts through a real model into ./demo-out
	$(BIN)/nightmill run examples/packages.parquet -o demo-out --model demo --prompt-column description \
		--system-prompt "Summarise this software package in one short sentence." --max-tokens 48
	$(BIN)/nightmill results demo-out --limit 5

.PHONY: lint
lint: $(VENV)/.dev  ## ruff, mypy strict, import rules
	$(BIN)/ruff format --check jobs worker kernels migrations deploy tests bench
	$(BIN)/ruff check jobs worker kernels migrations deploy tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: docs
docs: $(VENV)/.dev  ## write docs/cli.md from the commands' help
	$(BIN)/python -m nightmill.cli.reference > docs/cli.md

.PHONY: services
services: $(VENV)/.dev  ## install PostgreSQL, RabbitMQ and Ceph (Debian packages, as root) without starting anything
	@$(BIN)/python -m deploy.native.packages

MODEL ?= demo
WORKERS ?= 2
S3 ?= auto
.PHONY: up
up: services  ## the whole system as processes: PostgreSQL, RabbitMQ, S3, two workers; MODEL=, WORKERS=, S3=ceph|moto
	@$(BIN)/python -m deploy.native up --model "$(MODEL)" --workers $(WORKERS) --s3 $(S3)

.PHONY: down
down: $(VENV)/.dev  ## stop what `make up` started, the workers first; CLEAN=1 removes the data, too
	@$(BIN)/python -m deploy.native down $(if $(CLEAN),--clean)

.PHONY: test
test: lint services  ## all checks: lint, then the test suite without the long tests
	$(BIN)/python -m pytest -m "not long"

.PHONY: test-long
test-long: $(VENV)/.dev services  ## the tests that take minutes
	$(BIN)/python -m pytest -m long

SEEDS ?= 5
DURATION ?= 90
.PHONY: chaos
chaos: services  ## kill everything at random for DURATION seconds, SEEDS times, and count rows: bench/chaos/last.json
	$(BIN)/python -m tests.chaos.run --seeds $(SEEDS) --duration $(DURATION)

OUT ?= bench/gpu
.PHONY: gpu
gpu: $(VENV)/.dev  ## prove and measure everything on a GPU, in at most 8 minutes: bench/gpu/RESULTS.md
	$(BIN)/python -m bench.gpu --out $(OUT)

.PHONY: bench
bench: $(VENV)/.dev  ## W1–W3: continuous, static and transformers in one run
	$(BIN)/nightmill bench --workload W1,W2,W3 --policy both --baseline transformers --json bench/last.json

.PHONY: bench-profile
bench-profile: $(VENV)/.dev  ## where a CPU's time goes in W1–W3, and the host's share of it: bench/profile/
	$(BIN)/python -m bench.host_share --write bench/profile
	$(BIN)/py-spy record --rate 100 --output bench/profile/W1.svg -- \
		$(BIN)/python $(BIN)/nightmill bench --workload W1

ROWS ?= 256
.PHONY: equal-results
equal-results: $(VENV)/.dev  ## one job on every instruction set, on one core and without a compiler: the table of who agrees; ROWS=256
	$(BIN)/python -m bench.equal_results --rows $(ROWS)

TRITON ?= installed 3.6.0
ARCHS ?= 80 86 89 90 100 120
.PHONY: kernels-check
kernels-check: $(VENV)/.dev  ## compile every Triton kernel for GPUs that are not here; JSON=FILE, TRITON="3.6.0", ARCHS="90", UPDATE=1
	$(BIN)/python -m nightmill_kernels.check --triton $(TRITON) --arch $(ARCHS) \
		$(if $(JSON),--json "$(JSON)") $(if $(UPDATE),--update)

MODELS ?=
.PHONY: rehearsal
rehearsal: $(VENV)/.dev  ## the GPU path on tensors without values, every launch compiled for sm_90; MODELS="qwen3-0.6b"
	$(BIN)/python -m bench.gpu.rehearsal $(if $(MODELS),--model $(MODELS))

.PHONY: venv-check
venv-check: $(VENV)/.dev  ## engine and kernels on Python 3.12, torch 2.11 and triton 3.6, as GPU machines have them (3 GB, once)
	$(BIN)/python bench/venv_check.py

ENGINES ?= nightmill,vllm,openvino,llama.cpp
ROUNDS ?= 3
.PHONY: bench-rivals
bench-rivals: $(VENV)/.dev  ## W1–W3 against other engines, each installed in a venv of its own: bench/RESULTS.md; ENGINES=, ROUNDS=
	@# vLLM's allocator.
	@[ -e /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ] || { [ "$$(id -u)" = 0 ] \
		&& apt-get update -qq && apt-get install -y -qq libtcmalloc-minimal4 >/dev/null; } \
		|| echo "without Debian's libtcmalloc-minimal4: vLLM runs slower than it could"
	$(BIN)/python -m bench.rivals --engines $(ENGINES) --rounds $(ROUNDS)
