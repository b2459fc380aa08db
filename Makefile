# Every target does all of its own set-up from a fresh clone.
PY := .venv/bin/python
export PYTHONPATH := $(CURDIR)
# Where bytecode is not kept, every process compiles all of the product and of the tests again.
unexport PYTHONDONTWRITEBYTECODE
RUN_DIR ?= runs
TEST_ENV := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 GLOO_SOCKET_IFNAME=lo
# Test files at a time; the longest come first (tests/longest_first.py).
JOBS := 2
SHARED = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What numpy's and torch's libraries pick on other CPUs: with AVX2, two threads and no AMX; with vectors of 16 bytes.
CPU_zen := OPENBLAS_CORETYPE=Zen ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 DNNL_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 PYTHONPATH=$(CURDIR)/tests/cases/another_cpu:$(CURDIR)
CPU_old := OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 DNNL_MAX_CPU_ISA=SSE41

# Engines need AVX2 and ask the CPU itself for it.
ENGINE_CPU_zen = $(CPU_zen)
ENGINE_CPU_old = $(filter-out DNNL_% ATEN_%,$(CPU_old))

LOCKED := -q --generate-hashes --no-header --no-annotate

.PHONY: help setup quickstart test unit contract system long mutants lint style sizes lock oracles tensorboard docs docs-serve

help:            ## This list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')"

setup:           ## Make .venv for this machine (CPU or GPU packages)
	@requirements/setup.sh

quickstart: setup ## A whole GRPO job on this machine: tiny MoE, 2 trainer ranks, 2 vLLM engines
	@.venv/bin/slipstream train experiment=quickstart

# Unit and contract tests go on at the same time, because contract tests wait for a third of theirs. They have less to
# do, and so the lower priority: both end together, and none goes on alone, beside cores that wait. System tests are
# alone: they use all of two cores, and Ray gives its processes 15 s to start (docs/LOG.md).
test: setup       ## Everything CI runs: unit, contract, system; fails at the end; PERSONALITY=zen or old: as on another CPU
	@echo "unit and contract tests at the same time (silent for some 10 minutes), then system tests"
	@failed=0; $(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target CONTRACT_PRIORITY='nice -n 3' unit contract || failed=1; \
	$(MAKE) --no-print-directory system || failed=1; exit $$failed

unit: setup       ## No GPU, network or Ray; 3 to 8 min on two cores
	@$(TEST_ENV) $(CPU_$(PERSONALITY)) $(PY) -m pytest tests/unit -q $(SHARED) --durations=40

contract: setup   ## Real Mooncake, real vLLM loaders, real processes, a real browser
	@requirements/browser.sh
	@$(TEST_ENV) $(ENGINE_CPU_$(PERSONALITY)) $(CONTRACT_PRIORITY) $(PY) -m pytest tests/contract -q $(SHARED) -o timeout=900 --durations=40

system: setup     ## Real Ray, vLLM, Mooncake and FSDP2 together
	@$(TEST_ENV) $(ENGINE_CPU_$(PERSONALITY)) $(PY) -m pytest tests/system -q $(SHARED) -o timeout=600 --durations=40

long: setup       ## What is learned in many steps, other examples of properties, and the packages for GPUs (12 GB, removed again); before a release, beside what CI runs
	@$(TEST_ENV) $(ENGINE_CPU_$(PERSONALITY)) $(PY) -m pytest tests/long -q $(SHARED) -o timeout=900 --durations=40
	@$(TEST_ENV) $(CPU_$(PERSONALITY)) PROPERTIES=long $(PY) -m pytest tests/unit -q $(SHARED) -o timeout=900 -m hypothesis
	@$(MAKE) --no-print-directory mutants

mutants: setup    ## Faults planted in the modules that can hurt a user: do their unit tests notice? Part of long
	@.venv/bin/uv pip install -q --no-deps --require-hashes --target .mutants --python $(PY) -r requirements/mutants.lock
	@$(TEST_ENV) $(PY) tests/mutants/plant.py $(MODULES)

lint: style       ## What pre-commit checks: style, and types, which take two minutes of a core
	@.venv/bin/basedpyright

style: setup      ## What CI checks beside the tests: ruff, imports, spelling, Dockerfiles
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports && .venv/bin/codespell && .venv/bin/hadolint docker/*.Dockerfile

sizes:           ## Lines, options, patches, processes, hops; REF=COMMIT: that commit beside the working tree
	@python3 bench/sizes.py $(REF)

lock: setup       ## Resolve requirements/*.in again, with the hashes of every file that may be installed
	@.venv/bin/uv pip compile $(LOCKED) --python-version 3.11 $(foreach l,$(shell $(PY) -m pip config get global.find-links 2>/dev/null),--find-links $(l)) --no-emit-find-links --override requirements/overrides.txt requirements/cpu.in -o requirements/cpu.lock
	@.venv/bin/uv pip compile $(LOCKED) --python-version 3.11 --python-platform x86_64-manylinux_2_28 requirements/gpu.in -o requirements/gpu.lock
	@.venv/bin/uv pip compile $(LOCKED) --python-version 3.11 requirements/uv.in -o requirements/uv.lock
	@.venv/bin/uv pip compile $(LOCKED) --no-deps --python-version 3.11 requirements/oracles.in -o requirements/oracles.lock
	@.venv/bin/uv pip compile $(LOCKED) --no-deps --python-version 3.11 requirements/mutants.in -o requirements/mutants.lock

oracles: setup   ## Losses and advantages against TRL's and verl's own functions, which are installed into .oracles
	@.venv/bin/uv pip install -q --no-deps --require-hashes --target .oracles --python $(PY) -r requirements/oracles.lock
	@$(PY) tests/oracles/record.py

tensorboard: setup ## Curves of all runs in RUN_DIR (runs) on http://127.0.0.1:6006
	@.venv/bin/tensorboard --logdir "$(RUN_DIR)" --host 127.0.0.1

docs: setup       ## The documentation as a site in build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q

docs-serve: setup ## The same on http://127.0.0.1:8000, built again when a page changes
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve --no-strict -a 127.0.0.1:8000
