# artd: environments, checks, tests, demo. `make help` lists the targets.
# PYTHON chooses the interpreter: 3.11, 3.12 or 3.13. Default: the one that .venv was made with, else python3.11, else python3.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BASE := import sys; print(getattr(sys, "_base_executable", sys.executable))
PYTHON ?= $(shell .venv/bin/python -I -c '$(BASE)' 2>/dev/null || python3.11 -I -c '$(BASE)' 2>/dev/null || command -v python3)
STEPS ?=
SEED ?=
ARGS ?=
MINUTES ?=
KILLS ?=
REAL ?=
VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds what .venv is made from: no file times, which a checkout changes.
STAMP := $(VENV)/.artd-$(shell { cat artd/runtimes/locks/base-*.txt pyproject.toml .ci/venv; \
	$(PYTHON) -I -c '$(BASE); print(sys.version)' 2>&1 || true; } | sha256sum | cut -c1-12)
TORCH_ENV = PYTHONPATH="$$($(BIN)/python -m artd.runtimes.overlay path)" "$$($(BIN)/python -m artd.runtimes.overlay python)"
PYTEST_TORCH = $(TORCH_ENV) -m pytest -p no:cacheprovider

# Without byte code every process of a new runtime compiles Megatron-Core or vLLM again: 20 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv runtimes demo demo-moe check format quick test test-slow test-teeth root soak clean

##@ Set up
venv: $(STAMP) ## make .venv from its lock: daemon, client and tests (30 s); the other targets do it when needed

$(STAMP):
	@bash .ci/venv "$(PYTHON)" "$(VENV)"
	@rm -f $(VENV)/.artd-* && touch $(STAMP)

runtimes: venv ## install trainer (Megatron-Core) and engine (vLLM) for the CPU: 4 GB, kept outside the checkout
	@$(BIN)/artd runtime install megatron --cpu --test-overlay
	@$(BIN)/artd runtime install vllm --cpu

##@ See it work
demo: venv runtimes ## train SmolLM2-135M on capitals and show its reward rise; STEPS=n SEED=n ARGS=...
	@$(BIN)/python examples/capitals.py $(if $(STEPS),--steps $(STEPS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

demo-moe: venv runtimes ## train a small mixture of experts with expert replay; STEPS=n SEED=n ARGS=...
	@$(BIN)/python examples/moe.py $(if $(STEPS),--steps $(STEPS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

##@ Change it: the inner loop
check: venv ## check lint, format, types and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: venv ## let ruff fix and format the code
	@$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

# Two halves of about the same length, one for each core. The first runs beside the second and prints its log behind it; both
# run to their end, whatever fails.
define HALVES
@log=$$(mktemp); { rc=0; $(1); exit $$rc; } >$$log 2>&1 & half=$$!; \
	trap 'kill $$half 2>/dev/null || true; rm -f $$log' EXIT; \
	main=0; $(2) || main=$$?; rc=0; wait $$half || rc=$$?; cat $$log; [ $$main -eq 0 ] && [ $$rc -eq 0 ]
endef

# Temporary folders in memory, where there is such a folder: half of the fast tests' time is fsync. What durability needs of a disk is
# proved by tests/crash, which `make test` runs on the disk.
FAST := $(if $(wildcard /dev/shm/.),PYTEST_DEBUG_TEMPROOT=/dev/shm) $(BIN)/python -m pytest -q -x -m "not slow and not real and not torch and not simulation"

quick: venv ## run ruff and the fast tests: no engine, no runtime (1 minute)
	@$(BIN)/ruff check .
	$(call HALVES,$(FAST) -p no:cacheprovider tests/model tests/attack || rc=$$?,$(FAST) tests/unit)

##@ Test it
BESIDE := tests/model tests/crash tests/security tests/gateway tests/process tests/conformance tests/cli
test: venv runtimes ## run every test that is not slow, with the real trainer and the real engine (15 minutes)
	$(call HALVES,$(PYTEST_TORCH) -m "not slow" tests/trainer || rc=$$?; \
		$(BIN)/python -m pytest -p no:cacheprovider -m "not slow" $(BESIDE) || rc=$$?,\
		$(BIN)/python -m pytest -m "not slow and not torch" $(BESIDE:%=--ignore=%) --ignore=tests/trainer)

ENGINES := tests/conformance tests/engine tests/e2e
test-slow: venv runtimes ## run the slow tests (40 minutes)
	$(call HALVES,$(BIN)/python -m pytest -p no:cacheprovider -m "slow and not torch" $(ENGINES) || rc=$$?,\
		{ main=0; $(BIN)/python -m pytest -m "slow and not torch" $(ENGINES:%=--ignore=%) --ignore=tests/trainer || main=$$?; \
		$(PYTEST_TORCH) -m slow tests/trainer || main=$$?; (exit $$main); })

test-teeth: venv runtimes ## plant bugs one by one in a copy of the tree: each must turn its test red; ARGS=NAME...
	@$(BIN)/python -m tests.teeth.run $(ARGS)

root: venv ## run, as root, the tests that tests/SKIPS lets other accounts skip
	@ARTD_SKIP_NONE=1 $(BIN)/python -m pytest -q -p no:cacheprovider $$(sed -n 's/^[a-z]* *\(tests.*\)/\1/p' tests/SKIPS)

soak: venv $(if $(REAL),runtimes) ## kill and pause processes under load; MINUTES=n KILLS=n SEED=n REAL=1 ARGS=...
	@$(BIN)/python -m tests.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(KILLS),--kills $(KILLS)) $(if $(REAL),--real) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

##@ Other
help: ## show this list
	@echo 'make TARGET [PYTHON=PATH]    Python 3.11, 3.12 or 3.13. New here? CONTRIBUTING.md'
	@sed -n -e 's/^##@ \(.*\)/\n\1/p' -e 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

clean: ## delete .venv and caches; runtimes and data stay (`artd runtime list` shows where)
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
