"""What follows from several options together: one row per rule, worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import LoraConfig, RunConfig

QUICK = ["experiment=quickstart"]
ADAPTER = [*QUICK, "model=tiny_qwen3", "trainer.ep_size=1", "weight_sync.mode=adapter"]
BESIDE, OPEN = "run.eval_beside=true", "rollout.max_num_seqs=null"
ONE_GPU, GPUS = "experiment=quickstart_one_gpu", "experiment=quickstart_gpu"
AGENT = ["rollout.agent=a.py:f", "rollout.episodes.max_turns=3", "rollout.sampling.max_tokens=5"]
Of = Callable[[RunConfig], Any]
CASES: dict[str, tuple[Of, list[tuple[list[str], Any]]]] = {
    "most sampled tokens": (
        lambda config: config.max_response_tokens,
        [
            (["rollout.sampling.max_tokens=5"], 5),
            (AGENT, 15),
            ([*AGENT, "rollout.episodes.max_tokens=11"], 11),
        ],
    ),
    "longest prompt": (
        lambda config: config.max_prompt_tokens,
        [
            (["rollout.max_model_len=64", "rollout.sampling.max_tokens=5", "data.max_prompt_tokens=null"], 59),
            (["data.max_prompt_tokens=7"], 7),
        ],
    ),
    "slots of adapters": (
        lambda config: config.num_adapter_slots,
        [
            ([*ADAPTER, "algorithm.max_staleness_steps=0"], 2),
            ([*ADAPTER, "algorithm.max_staleness_steps=3"], 5),
            ([*ADAPTER, "algorithm.max_staleness_steps=3", "run.eval_every_steps=2", BESIDE], 6),
        ],
    ),
    "evaluates beside training": (
        lambda config: config.evaluates_beside,
        [([BESIDE], True), ([], False), (["data.eval_path=null", "run.eval_every_steps=0"], False)],
    ),
    "held-out prompts at a time": (
        lambda config: config.num_evaluated_groups,
        [
            (["rollout.max_concurrent_groups=7"], 7),
            # a fifth of two engines' 200 requests: a quarter of what training has
            ([BESIDE, "rollout.max_num_seqs=100", "run.eval_samples_per_prompt=1"], 40),
            ([BESIDE, "rollout.max_num_seqs=100", "run.eval_samples_per_prompt=3"], 13),
            ([BESIDE, "rollout.max_num_seqs=1", "rollout.num_workers=1"], 1),
        ],
    ),
    "requests of an engine with an evaluation beside": (
        lambda config: config.engine_num_seqs,
        [
            # 192 for training (16 groups of 24 on two engines), and a quarter more: 240, which has a graph
            ([BESIDE, OPEN], 240),
            ([OPEN], 192),
            ([OPEN, "algorithm.max_staleness_steps=1"], 192),  # rollout.max_concurrent_groups=16
            ([OPEN, "algorithm.max_staleness_steps=1", "rollout.max_concurrent_groups=64"], 384),
            ([OPEN, "rollout.num_workers=3"], 144),
            ([OPEN, "algorithm.group_size=5"], 48),  # 8 groups of 5 are 40; multiples of 16 have a graph
            ([OPEN, "algorithm.group_size=400"], 1024),
            ([OPEN, "algorithm.group_size=400", "rollout.max_num_batched_tokens=512"], 512),
            (["rollout.max_num_seqs=7"], 7),
        ],
    ),
    "GPUs of a rank, of a worker": (  # Ray counts ten-thousandths
        lambda config: (config.gpus_of_rank, config.gpus_of_worker),
        [
            ([ONE_GPU, "rollout.num_workers=1"], (0.5, 0.5)),
            ([ONE_GPU, "rollout.num_workers=6"], (0.1428, 0.1428)),
            ([GPUS, "rollout.tp_size=2"], (1.0, 2.0)),
            *(
                ([GPUS, f"rollout.num_workers={2 * per_gpu}", f"rollout.workers_per_gpu={per_gpu}"], (1.0, share))
                for per_gpu, share in ((2, 0.5), (3, 0.3333), (7, 0.1428))
            ),
        ],
    ),
    "GPUs of engines": (
        lambda config: config.rollout.num_gpus,
        [([GPUS, "rollout.num_workers=6", "rollout.workers_per_gpu=3"], 2)],
    ),
    "rounds merged weights by a seed": (
        lambda config: (config.rounding_seed, config.loses_updates),
        [
            (["run.seed=9", "weight_sync.rounding=dithered"], (9, False)),
            (["run.seed=9", "weight_sync.rounding=nearest"], (None, True)),
            (["trainer.mode=full"], (0, False)),
            ([*ADAPTER], (0, False)),
        ],
    ),
    "reads the adapter to start from": (
        lambda config: config.reads_initial_adapter,
        [
            ([], False),
            (["trainer.lora.init_from=a"], True),
            (["trainer.lora.init_from=a", "run.resume=r"], False),
            (["trainer.lora.init_from=a", "run.resume=r", "algorithm.kl_coef=0.1"], True),
        ],
    ),
    "updates, scores, ratios": (
        lambda config: (
            config.algorithm.updates_per_step, config.algorithm.scores_first, config.algorithm.ratio_is_one,
            config.algorithm.needs_reference, config.algorithm.penalizes_rewards, config.algorithm.is_corrected,
        ),
        [
            (["algorithm.correction=none"], (1, False, True, False, False, False)),
            (["algorithm.minibatches_per_step=2", "algorithm.epochs_per_step=3"], (6, True, False, False, False, True)),
            (["algorithm.kl_coef=0.1", "algorithm.kl_in=loss"], (1, False, True, True, False, True)),
            (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], (1, True, True, True, True, True)),
            (
                ["algorithm.ratio_baseline=rollout", "algorithm.correction=none"],
                (1, False, False, False, False, True),
            ),
        ],
    ),
    "bounds of the correction": (
        lambda config: config.algorithm.correction_bounds,
        [
            (["algorithm.correction=tis", "algorithm.correction_max=3"], (0.0, 3.0)),
            (["algorithm.correction=icepop", "algorithm.correction_min=0.25"], (0.25, 5.0)),
        ],
    ),
    "what a length adds": (
        lambda config: config.reward.shapings,
        [
            ([], ()),
            (["reward.overlong_tokens=1"], ("overlong_penalty",)),
            (["reward.length_penalty=-0.5"], ("length_penalty",)),
        ],
    ),
    "longest judgement": (
        lambda config: config.reward.longest_timeout_s,
        [
            (["reward.timeout_s=7"], 7),
            (["reward.parts={a: {timeout_s: 3}, b: {timeout_s: 9}}"], 9),
        ],
    ),
    "may end early": (
        lambda config: config.rollout.sampling.can_end_early,
        [
            (["rollout.sampling.stop_at_eos=false"], False),
            (["rollout.sampling.stop_at_eos=true"], True),
            (["rollout.sampling.stop_at_eos=false", "rollout.sampling.stop=[a]"], True),
            (["rollout.sampling.stop_at_eos=false", "rollout.sampling.stop_token_ids=[3]"], True),
        ],
    ),
    "k of pass@k": (
        lambda config: config.run.pass_ks,
        [
            (["run.eval_samples_per_prompt=1"], (1,)),
            (["run.eval_samples_per_prompt=4"], (1, 2, 4)),
            (["run.eval_samples_per_prompt=5"], (1, 2, 4, 5)),
        ],
    ),
    "is due": (
        lambda config: [step for step in range(11) if config.run.is_due(3, step)],
        [(["run.num_steps=10"], [0, 3, 6, 9, 10])],
    ),
    "sets": (
        lambda config: (config.data.held_out_sources, config.data.training_sources),
        [
            (["data.eval_path=h", "data.path=p"], ({"": "h"}, ("p",))),
            (
                ["data.eval_path=null", "data.eval_sets.a=x", "data.path=null", "data.sources=[p,q]"],
                ({"a": "x"}, ("p", "q")),
            ),
        ],
    ),
    "how evaluations sample": (
        lambda config: (
            config.rollout.eval_sampling.temperature, config.rollout.eval_sampling.max_tokens,
            config.rollout.eval_sampling.seed, config.rollout.eval_sampling.drawing.top_k,
        ),
        [
            (["rollout.sampling.temperature=0.5", "rollout.sampling.max_tokens=3"], (0.5, 3, None, 0)),
            (["rollout.eval.temperature=0.25", "rollout.eval.seed=4", "rollout.eval.top_k=9"], (0.25, 4, 4, 9)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("of", "words", "wanted"),
    [(of, words, wanted) for of, rows in CASES.values() for words, wanted in rows],
    ids=[f"{name} {number}" for name, (_, rows) in CASES.items() for number in range(len(rows))],
)
def test_it_follows_from_the_options(of: Of, words: list[str], wanted: Any) -> None:
    found = of(load_run_config([*QUICK, *words]))
    assert found == wanted


def test_ranks_of_kinds_keep_the_scale_and_slots_have_room_for_the_largest() -> None:
    lora = LoraConfig(rank=8, alpha=16.0, attention_rank=4, expert_rank=12)
    kinds = [(one.rank, one.alpha) for one in (lora.for_attention, lora.for_mlp, lora.for_experts) if one is not None]
    assert kinds == [(4, 8.0), (8, 16.0), (12, 24.0)] and lora.slot_rank == 16
    assert LoraConfig(rank=8, alpha=16.0, targets=("mlp", "experts"), expert_rank=16).for_attention is None
    assert LoraConfig(rank=8, alpha=16.0, targets=("attention", "experts"), attention_rank=16).slot_rank == 16
    assert LoraConfig(rank=8, alpha=16.0, targets=("attention", "mlp")).slot_rank == 8
    assert [LoraConfig(rank=rank, alpha=1.0).slot_rank for rank in (1, 9, 33, 513)] == [1, 16, 64, 0]
