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

# Parts of about the same length beside each other. The first one prints as it runs, each other one's log follows; all run to their
# end, whatever fails.
define PARTS
@logs=$$(mktemp -d) jobs= red=0; trap 'kill $$jobs 2>/dev/null || true; rm -rf $$logs' EXIT; \
	$(foreach part,2 3 4 5,$(if $($(part)),{ rc=0; $($(part)) || rc=1; exit $$rc; } >$$logs/$(part) 2>&1 & jobs+=" $$!";)) \
	( rc=0; $(1) || rc=1; exit $$rc ) || red=1; for job in $$jobs; do wait $$job || red=1; done; cat $$logs/*; exit $$red
endef

# Temporary folders in memory, where there is such a folder: half of the fast tests' time is fsync. What durability needs of a disk is
# proved by tests/crash and tests/daemon, which `make test` runs on the disk.
MEMORY := $(if $(wildcard /dev/shm/.),TMPDIR=/dev/shm)
FAST := $(MEMORY) $(BIN)/python -m pytest -q -x -p no:cacheprovider -m "not slow and not real and not torch and not simulation"
A := tests/attack/test_

# Five parts for two cores: a good part of their time they wait.
quick: venv ## run ruff and the fast tests: no engine, no runtime (1 minute)
	@$(BIN)/ruff check .
	$(call PARTS,$(FAST) tests/unit/test_[a-l]*.py,$(FAST) tests/unit/test_[m-z]*.py,$(FAST) tests/model $(A)[a-c]*.py,\
		$(FAST) $(A)[d-h]*.py $(A)[s-z]*.py,$(FAST) $(A)[i-r]*.py)

##@ Test it
# Three parts for two cores. The first one is everything that the others leave.
BESIDE := tests/daemon tests/conformance
SHORT := tests/unit tests/attack tests/model
ALONE := tests/cli tests/crash tests/gateway tests/process tests/security
test: venv runtimes ## run every test that is not slow, with the real trainer and the real engine (15 minutes)
	$(call PARTS,$(BIN)/python -m pytest -m "not slow and not torch" --ignore=tests/trainer $(patsubst %,--ignore=%,$(BESIDE) $(SHORT) $(ALONE)),\
		$(PYTEST_TORCH) -m "not slow" tests/trainer || rc=1; $(BIN)/python -m pytest -p no:cacheprovider -m "not slow" $(BESIDE),\
		$(MEMORY) $(BIN)/python -m pytest -p no:cacheprovider -m "not slow" $(SHORT) || rc=1; \
		$(BIN)/python -m pytest -p no:cacheprovider -m "not slow" $(ALONE))

ENGINES := tests/conformance tests/engine tests/e2e
test-slow: venv runtimes ## run the slow tests (40 minutes)
	$(call PARTS,$(BIN)/python -m pytest -m "slow and not torch" $(ENGINES:%=--ignore=%) --ignore=tests/trainer || rc=1; \
		$(PYTEST_TORCH) -m slow tests/trainer,\
		$(BIN)/python -m pytest -p no:cacheprovider -m "slow and not torch" $(ENGINES))

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
