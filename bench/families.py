"""A short run of each family that the trainer has: does it learn, and do trainer and engine agree?

    python bench/families.py                     the families of docs/families.md
    python bench/families.py mixtral olmoe
    python bench/families.py --gpu gemma3_text   on one GPU, which trainer and engine share, in bfloat16

Each is the quick start with a tiny random model of that family, one engine, and two trainer ranks that share the
experts, if there are any. Reward is held-out, before the first step and after the last one; k3 is the largest of all
steps but the first two. Prints its environment and a table; writes bench/results/families-cpu.json, and keeps the rows
there that are of the same environment; families-one-gpu.json with --gpu.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.runs import figures, read_rows, train  # noqa: E402

NUM_STEPS = 60
EXPERTS = ["model=tiny_qwen3_moe", "trainer.num_ranks=2", "trainer.ep_size=2"]
LATENT = ["model=tiny_deepseek_v3", "trainer.num_ranks=2", "trainer.ep_size=2"]
DENSE = ["model=tiny_qwen3", "trainer.num_ranks=1", "trainer.ep_size=1"]
SQUARE = {"hidden_size": 128}
"""Four heads of 32: some engines know no other width of heads than hidden_size / num_attention_heads."""
LINEAR_ATTENTION = {
    "full_attention_interval": 2,
    "layer_types": "[linear_attention,full_attention]",  # vLLM 0.25 reads no other interval than 4
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GEMMA4 = {
    "sliding_window": 4,
    "layer_types": "[sliding_attention,full_attention]",
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": "true",
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "rope_theta": "null",
}
FAMILIES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", DENSE, SQUARE),
    "mistral": ("MistralForCausalLM", DENSE, {"sliding_window": 4}),
    "mixtral": ("MixtralForCausalLM", EXPERTS, {"num_local_experts": 8, "intermediate_size": 64}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", EXPERTS, {**SQUARE, "shared_expert_intermediate_size": 64}),
    "olmoe": (
        "OlmoeForCausalLM",
        EXPERTS,
        {**SQUARE, "intermediate_size": 64, "norm_topk_prob": "false", "rms_norm_eps": 1e-5},
    ),
    "llama": ("LlamaForCausalLM", DENSE, {}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        DENSE,
        {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    ),
    "gemma4_text": ("Gemma4ForCausalLM", DENSE, GEMMA4),
    "gemma4_text with experts": (
        "Gemma4ForCausalLM",
        EXPERTS,
        {**GEMMA4, "model_type": "gemma4_text", "enable_moe_block": "true", "top_k_experts": 2},
    ),
    "kimi_k2": ("DeepseekV3ForCausalLM", LATENT, {}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        [*EXPERTS, "model.dtype=bfloat16"],  # the CPU engine's linear attention has no other format, nor other heads
        LINEAR_ATTENTION,
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        [*EXPERTS, "model.dtype=bfloat16"],
        LINEAR_ATTENTION,
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        LATENT,
        {"n_group": 1, "v_head_dim": 48, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8},
    ),
}
"""model_type, or the name of a row whose fields have it -> its class, the preset that it changes, and the fields of
config.json that it needs."""
SHOWN = ("eval_reward_first", "eval_reward_last", "k3_max", "publish_bytes", "wall_s")


def words_of(family: str, on_gpu: bool) -> list[str]:
    """Options of a family's run."""
    architecture, preset, fields = FAMILIES[family]
    if on_gpu:
        preset = [preset[0], "model.dtype=bfloat16", "cluster.dashboard=false"]
    fields = {"model_type": family, "architectures": f"[{architecture}]", **fields}
    return [
        "experiment=quickstart_one_gpu" if on_gpu else "experiment=quickstart",
        *preset,
        *(f"++model.hf_config.{name}={value}" for name, value in fields.items()),
        "rollout.num_workers=1",
        f"run.num_steps={NUM_STEPS}",
        f"run.eval_every_steps={NUM_STEPS}",
        "run.checkpoint_every_steps=0",
    ]


def main() -> None:
    """Run the named families one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--gpu", action="store_true", help="on one GPU, which trainer and engine share")
    parser.add_argument("--out", type=Path, help="default: bench/results/families-<device>.json")
    args = parser.parse_args()
    args.out = args.out or ROOT / "bench" / "results" / f"families-{'one-gpu' if args.gpu else 'cpu'}.json"
    unknown = set(args.families) - set(FAMILIES)
    if unknown:
        parser.error(f"families must be of {', '.join(FAMILIES)}, got {', '.join(sorted(unknown))}")
    report: dict[str, Any] = {"environment": environment(), "runs": {}}
    print(json.dumps(report["environment"], indent=2))
    if args.out.exists():
        before = json.loads(args.out.read_text())
        if before["environment"] == report["environment"]:
            report["runs"] = before["runs"]
    for family in args.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            run_folder, wall_s = train(family, words_of(family, args.gpu), Path(folder))
            report["runs"][family] = {"wall_s": wall_s, **figures(read_rows(run_folder))}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'':12}" + "".join(f"{name:>20}" for name in SHOWN))
    for family, row in report["runs"].items():
        print(f"{family:12}" + "".join(f"{row[name]:>20.3g}" for name in SHOWN))


if __name__ == "__main__":
    main()
