# Every target does all of its own set-up from a fresh clone.
PY := .venv/bin/python
export PYTHONPATH := $(CURDIR)
RUN_DIR ?= runs
TEST_ENV := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 GLOO_SOCKET_IFNAME=lo RAY_AUTH_MODE=disabled

.PHONY: help setup quickstart test unit contract system lint lock tensorboard

help:            ## This list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | column -t -s "$$(printf '\t')"

setup:           ## Make .venv for this machine (CPU or GPU packages)
	@requirements/setup.sh

quickstart: setup ## A whole GRPO job on this machine: tiny MoE, 2 trainer ranks, 2 vLLM engines
	@.venv/bin/slipstream train experiment=quickstart

test: setup       ## Everything CI runs, in tiers: unit, contract, system
	@$(MAKE) --no-print-directory unit contract system

unit: setup       ## No GPU, network or Ray; under 90 s
	@$(TEST_ENV) $(PY) -m pytest tests/unit -q -n 2 --dist loadfile

contract: setup   ## Real Mooncake, real vLLM loaders, real processes
	@$(TEST_ENV) $(PY) -m pytest tests/contract -q -n 2 --dist loadfile --durations=10

system: setup     ## Real Ray, vLLM, Mooncake and FSDP2 together
	@$(TEST_ENV) $(PY) -m pytest tests/system -q --durations=10

lint: setup       ## What pre-commit and CI check
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports && .venv/bin/codespell && .venv/bin/hadolint docker/*.Dockerfile && .venv/bin/basedpyright

lock: setup       ## Resolve requirements/*.in again
	@.venv/bin/uv pip compile -q --python-version 3.11 $(foreach l,$(shell $(PY) -m pip config get global.find-links 2>/dev/null),--find-links $(l)) --no-emit-find-links --override requirements/overrides.txt requirements/cpu.in -o requirements/cpu.lock --no-header --no-annotate
	@.venv/bin/uv pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_28 requirements/gpu.in -o requirements/gpu.lock --no-header --no-annotate

tensorboard: setup ## Curves of all runs in RUN_DIR (runs) on http://127.0.0.1:6006
	@.venv/bin/tensorboard --logdir "$(RUN_DIR)" --host 127.0.0.1
