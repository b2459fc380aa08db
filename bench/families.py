"""A short run of each family that the trainer has: does it learn, and do trainer and engine agree?

    python bench/families.py                     the families of docs/families.md
    python bench/families.py mixtral olmoe
    python bench/families.py --gpu gemma3_text   on one GPU, which trainer and engine share, in bfloat16
    python bench/families.py --own --kill 4      the families' own widths; every visible GPU has a row to itself

Each is the quick start with a tiny random model of that family, one engine, and two trainer ranks that share the
experts, if there are any. With --own it is 10 steps of 256 responses of 64 tokens by a few random layers of the
published shape. --kill kills the engine's process once that step is done, and adds the seconds until it serves again,
by phase (docs/metrics.md, fleet.jsonl). Reward is held-out, before the first step and after the last one; k3 is the
largest of all steps but the first two. Prints its environment and a table; writes bench/results/families-cpu.json, and
keeps the rows there that are of the same environment; families-one-gpu.json with --gpu, families-own-gpu.json with
--own. A row that failed says why.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.recovery import Job, processes_of  # noqa: E402
from bench.recovery_phases import marks_after, phases_of  # noqa: E402
from bench.runs import figures, read_rows  # noqa: E402
from slipstream.conf.architecture.families import family_of  # noqa: E402

NUM_STEPS = 60
EXPERTS = ["model=tiny_qwen3_moe", "trainer.num_ranks=2", "trainer.ep_size=2"]
LATENT = ["model=tiny_deepseek_v3", "trainer.num_ranks=2", "trainer.ep_size=2"]
DENSE = ["model=tiny_qwen3", "trainer.num_ranks=1", "trainer.ep_size=1"]
SQUARE = {"hidden_size": 128}
"""Four heads of 32: some engines know no other width of heads than hidden_size / num_attention_heads."""
LINEAR_ATTENTION = {
    "layer_types": "[full_attention,linear_attention]",  # the other way round a policy settles on one letter
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LINEAR_WORDS = [
    "algorithm.entropy_coef=0.1", "trainer.optim.lr=7e-3", "algorithm.group_size=8", "rollout.sampling.max_tokens=2",
]  # fmt: skip
"""Options with which a policy with linear attention finds more than one letter, as in tests/system/test_learning.py."""
INDEXER = {"index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128}
"""Sizes that DeepGEMM's kernels have."""
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
        {**LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        [*EXPERTS, "model.dtype=bfloat16"],
        {**LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", [*DENSE, "model.dtype=bfloat16"], LINEAR_ATTENTION),
    "deepseek_v32": ("DeepseekV32ForCausalLM", LATENT, INDEXER),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        LATENT,
        {**INDEXER, "indexer_rope_interleave": "true", "n_group": 1, "rms_norm_eps": 1e-5},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        LATENT,
        {"n_group": 1, "v_head_dim": 48, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8},
    ),
}
"""model_type, or the name of a row whose fields have it -> its class, the preset that it changes, and the fields of
config.json that it needs."""
LAYERS_OF_64 = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 64}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next_80b_a3b", {"num_hidden_layers": 4}),
    "qwen3_5_text": ("qwen3_5_27b", {"num_hidden_layers": 4}),
    "qwen3_5_moe_text": ("qwen3_5_35b_a3b", {"num_hidden_layers": 4}),
    "gemma3_text": ("gemma3_27b", {"num_hidden_layers": 6}),
    "gemma4_text": ("gemma4_31b", {"num_hidden_layers": 6}),
    "gemma4_text with experts": ("gemma4_26b_a4b", {"num_hidden_layers": 6}),
    "glm4_moe_lite": ("glm_4_7_flash", {"num_hidden_layers": 4}),
    "minimax_m2": ("minimax_m2", {"num_hidden_layers": 2, "quantization_config": None}),
    "deepseek_v32": ("deepseek_v3_2", {**LAYERS_OF_64, "quantization_config": None}),
    "glm_moe_dsa": ("glm_5", LAYERS_OF_64),
    "kimi_k2": ("kimi_k2_5", {**LAYERS_OF_64, "quantization_config": None}),
    "deepseek_v32 beyond index_topk": ("deepseek_v3_2", {**LAYERS_OF_64, "quantization_config": None}),
}
"""Row of --own -> its preset, and what is less of it; None: without that field. Engines hold bfloat16."""
LONG_PROMPTS = "data.path=LONG_PROMPTS"
"""Stands for the file that row_of writes."""
LONG_PROMPT_TOKENS = 1984
"""64 fewer than index_topk: a response's first 64 tokens see every key before them, those after it chosen ones."""
MORE_WORDS = {
    "deepseek_v32 beyond index_topk": [
        LONG_PROMPTS, "data.max_prompt_tokens=null", "rollout.max_model_len=3584",
        "rollout.sampling.max_tokens=1536", "rollout.sampling.stop_at_eos=false", "algorithm.groups_per_step=2",
        "algorithm.group_size=8", "run.num_steps=6",
    ],
}  # fmt: skip
"""Row of --own -> further options of it."""
OWN_WORDS = [
    "experiment=qwen3_moe_2gpu", "cluster.share_gpu=true", "rollout.gpu_memory_utilization=0.35",
    "rollout.kv_cache_bytes=8589934592", "trainer.max_microbatch_tokens=16384", "algorithm.max_staleness_steps=0",
    "run.num_steps=10", "run.eval_every_steps=0", "data.eval_path=null", "cluster.dashboard=false",
    "algorithm.entropy_coef=0.01",  # no answer is right, and weights change all the same
]  # fmt: skip
REPLAYED = ("glm4_moe_lite", "minimax_m2", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "deepseek_v32 beyond index_topk")
"""Rows of --own whose routes are recorded and replayed."""
SHOWN = (
    "eval_reward_first", "eval_reward_last", "k3_max", "rollout_tokens_per_s", "publish_s", "publish_bytes", "wall_s",
)  # fmt: skip


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
        *(LINEAR_WORDS if LINEAR_ATTENTION.items() <= fields.items() else []),
        "rollout.num_workers=1",
        f"run.num_steps={NUM_STEPS}",
        f"run.eval_every_steps={NUM_STEPS}",
        "run.checkpoint_every_steps=0",
    ]


def own_words(family: str) -> list[str]:
    """Options of a run of the family's own widths."""
    preset, fields = OWN[family]
    return [
        *OWN_WORDS,
        f"model={preset}",
        *(f"++model.hf_config.{name}={value}" for name, value in fields.items() if value is not None),
        *(f"~model.hf_config.{name}" for name, value in fields.items() if value is None),
        f"parity.replay_routing={str(family in REPLAYED).lower()}",
        *MORE_WORDS.get(family, ()),
    ]


def row_of(words: list[str], card: str | None, kill: int | None, limit_s: float) -> dict[str, Any]:
    """Figures of one run, in a process group of its own. `card`: the GPU that it sees; None: all of them."""
    own, began = {} if card is None else {"CUDA_VISIBLE_DEVICES": card}, time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder, Job(with_prompts(words, Path(folder)), Path(folder), own) as job:
            killed = {} if kill is None else killed_after(job, kill, limit_s)
            job.wait(began + limit_s - time.monotonic())
            wall_s, rows = time.monotonic() - began, read_rows(job.folder.resolve())
            found = {"start_s": start_of(job.folder), **figures(rows), "k3_by_position": k3_by_position(rows)}
            return {"words": words, "wall_s": wall_s, **killed, **found}
    except SystemExit as error:
        return {"words": words, "wall_s": time.monotonic() - began, "failed": str(error)}


def with_prompts(words: list[str], folder: Path) -> list[str]:
    """The options, with a file of long prompts of digits where they ask for one."""
    path, draw = folder / "long.jsonl", random.Random(1)
    if LONG_PROMPTS in words:
        texts = ("".join(draw.choices("0123456789", k=LONG_PROMPT_TOKENS)) for _ in range(8))
        path.write_text("".join(json.dumps({"prompt": text, "answer": text[-1]}) + "\n" for text in texts))
    return [f"data.path={path}" if word == LONG_PROMPTS else word for word in words]


def start_of(folder: Path) -> dict[str, float]:
    """Seconds of each phase of a run's start."""
    spans = json.loads((folder / "startup.jsonl").read_text().splitlines()[0])["spans"]
    return {f"{span['who']}: {span['what']}": span["to_s"] - span["from_s"] for span in spans}


def k3_by_position(rows: list[dict[str, Any]]) -> dict[str, float]:
    """First position of a range in the response -> mean of the steps' k3 there."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name.startswith("parity/k3_from_") and value is not None:
                found[name].append(value)
    return {name: statistics.mean(values) for name, values in found.items()}


def killed_after(job: Job, step: int, limit_s: float) -> dict[str, Any]:
    """Kill the engine's process when the step is done. Returns how long it took to serve again, by phase."""
    began = time.monotonic()
    if not job.wait_until(lambda _: job.num_steps >= step, limit_s):
        raise SystemExit(f"step {step} was not done within {limit_s:g} s:\n{job.last_words}")
    _, *engine = processes_of(job, 0)
    if len(engine) != 1:
        raise SystemExit(f"the log must name one process of the engine, got {engine}")
    killed_at = time.time()
    os.kill(engine[0], signal.SIGKILL)
    left_s = began + limit_s - time.monotonic()
    if not job.wait_until(lambda rows: "serving" in marks_after(rows, 0, killed_at), left_s):
        raise SystemExit(f"the killed engine was not back within {left_s:.0f} s:\n{job.last_words}")
    marks = marks_after(job.rows, 0, killed_at)
    return {"serves_again_s": marks["serving"] - killed_at, "phases": phases_of(killed_at, marks)}


def run_rows(
    rows: dict[str, list[str]], cards: list[str], kill: int | None, limit_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of each, as they end: as many at a time as there are cards; without cards one after the other."""
    free: queue.Queue[str | None] = queue.Queue()
    for card in cards or [None]:
        free.put(card)

    def one(words: list[str]) -> dict[str, Any]:
        card = free.get()
        try:
            return row_of(words, card, kill, limit_s)
        finally:
            free.put(card)

    with ThreadPoolExecutor(len(cards) or 1) as pool:
        names = {pool.submit(one, words): name for name, words in rows.items()}
        for future in as_completed(names):
            yield names[future], future.result()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; --own: {', '.join(OWN)}; default: all")
    parser.add_argument("--gpu", action="store_true", help="on one GPU, which trainer and engine share")
    parser.add_argument("--own", action="store_true", help="their own widths, one row to a visible GPU")
    parser.add_argument("--kill", type=int, metavar="STEP", help="kill the engine once after this step")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds of one run, after which it is ended")
    parser.add_argument("--set", nargs="*", default=[], help="further options for every run")
    args = parser.parse_args()
    device = "own-gpu" if args.own else "one-gpu" if args.gpu else "cpu"
    out: Path = args.out or RESULTS / f"families-{device}.json"
    known = [name for name in (OWN if args.own else FAMILIES) if device != "cpu" or lacking(name) is None]
    if unknown := set(args.families) - set(known):
        parser.error(f"families must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    report: dict[str, Any] = {"environment": environment(args.commit), "runs": {}}
    print(json.dumps(report["environment"], indent=2))
    if out.exists():
        before = json.loads(out.read_text())
        if before["environment"] == report["environment"]:
            report["runs"] = before["runs"]
    cards = visible_cards(len(report["environment"]["gpus"])) if args.own else []
    chosen = args.families or known
    rows = {name: [*(own_words(name) if args.own else words_of(name, args.gpu)), *args.set] for name in chosen}
    for name, row in run_rows(rows, cards, args.kill, args.limit_s):
        report["runs"][name] = row
        write_report(out, report)
        print(f"{name}: {row.get('failed') or format(row['wall_s'], '.0f') + ' s'}", flush=True)
    print(f"{'':26}" + "".join(f"{name:>22}" for name in SHOWN))
    for family, row in report["runs"].items():
        cells = [row.get(name) for name in SHOWN]
        print(f"{family:26}" + "".join(f"{'-' if cell is None else format(cell, '.3g'):>22}" for cell in cells))
    if any("failed" in report["runs"][name] for name in chosen):
        raise SystemExit(1)


def lacking(family: str) -> str | None:
    """What the CPU engine does not do of it."""
    return family_of({"model_type": family.partition(" ")[0]}).lacks_on_cpu


def visible_cards(num_gpus: int) -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(card) for card in range(num_gpus)] if given is None else given.split(",")


if __name__ == "__main__":
    main()
