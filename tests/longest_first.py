"""The order of test files: those that take longest start first, so that processes which share them end together.

Files whose tests wait for deadlines come between those that need both cores. A file that is not named here comes after
those that are. Where a file belongs is told by the tiers' `--durations`.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "unit/trainer/moe/test_moe_parallel.py",
    "unit/trainer/kernels/test_kernels.py",
    "unit/rollout/agents/test_episode_runner.py",
    "unit/orchestrator/offline/test_plan_command.py",
    "unit/orchestrator/cli/test_help.py",
    "unit/orchestrator/cli/test_signals.py",
    "unit/trainer/kernels/test_compiled.py",
    "unit/trainer/weights/test_packed_experts.py",
    "unit/orchestrator/offline/test_prediction_measured.py",
    "unit/rollout/rewards/test_hostile_rewards.py",
    "unit/bench/test_arithmetic.py",
    "unit/rollout/rewards/test_rewards.py",
    "unit/weight_sync/plan/test_proof.py",
    "unit/conf/test_checks.py",
    "unit/orchestrator/cli/test_cli_bad_input.py",
    "unit/trainer/moe/test_replay.py",
    "unit/weight_sync/plan/test_plan.py",
    "unit/conf/test_load.py",
    "unit/orchestrator/inputs/test_preflight.py",
    "unit/trainer/delivery/test_planned_layouts.py",
    "contract/test_engine_layouts.py",
    "contract/test_push_vllm.py",
    "contract/test_publish_faults.py",
    "contract/test_worker_process.py",
    "contract/test_engine_vllm.py",
    "contract/test_recorder_vllm.py",
    "contract/test_push_fleet.py",
    "contract/test_delta_publish.py",
    "contract/test_real_templates.py",
    "contract/test_view_browser.py",
    "contract/test_parity_faults.py",
    "contract/test_wheel.py",
    "contract/test_sampling_options.py",
    "contract/test_agents_page.py",
    "system/test_run.py",
    "system/test_ends.py",
    "system/test_sft.py",
    "system/test_learning.py",
    "system/test_ray_nodes.py",
    "system/test_workers.py",
    "system/test_agents.py",
    "system/test_adapter_mode.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests in place by their files; tests of one file, and files that take little, keep their order."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
