"""Every preset of conf/algorithm on the quick start's task: does it learn?

    python bench/algorithms.py            all presets, and a control whose advantages are shuffled
    python bench/algorithms.py gspo sapo
    python bench/algorithms.py reinforce_pp --set algorithm.kl_coef=0 --out FILE

The trainer samples from its own weights in place of engines, so that a run takes tens of seconds and needs neither Ray
nor vLLM: prompts, advantages, samples, updates, loss and optimizer are the product's. A batch is trained on one step
after it was sampled, so that ratios to the policy that sampled it are not 1. The teacher of `distill` is what the run
with grpo made, and answers in this process. `dpo` samples nothing: it is a run of `slipstream train` on pairs of the
right letter, four times, and four random characters; its policy is then sampled from as the others' are.
`bench/runs.py algorithm_<preset>` is the same with engines. Prints its environment and a table; writes
bench/results/algorithms-cpu.json.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench import runs  # noqa: E402
from bench.controls import SHUFFLED  # noqa: E402
from bench.environment import environment  # noqa: E402
from slipstream.conf.load import load_run_config  # noqa: E402
from slipstream.conf.schema import RunConfig  # noqa: E402
from slipstream.orchestrator.data.sources import read_rows  # noqa: E402
from slipstream.orchestrator.files.loss_metrics import loss_metrics  # noqa: E402
from slipstream.orchestrator.inputs.character_tokenizer import ALPHABET, SPECIAL_TOKENS  # noqa: E402
from slipstream.orchestrator.inputs.model_folder import prepare_model  # noqa: E402
from slipstream.orchestrator.inputs.rows.prompt_rows import PromptRows  # noqa: E402
from slipstream.orchestrator.inputs.text_encoder import TextEncoder  # noqa: E402
from slipstream.orchestrator.loop.ports import Stopwatch  # noqa: E402
from slipstream.orchestrator.loop.samples import advantage_function, draft_samples, filled  # noqa: E402
from slipstream.orchestrator.loop.updates import score, update  # noqa: E402
from slipstream.rollout.rewards.examples import share_of_answer  # noqa: E402
from slipstream.rollout.types import Group, Prompt, Rollout  # noqa: E402
from slipstream.trainer.options import TrainerOptions  # noqa: E402
from slipstream.trainer.rank import TrainerRank  # noqa: E402
from slipstream.trainer.scoring import Scorer  # noqa: E402
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores  # noqa: E402

PRESETS = (
    "grpo", "grpo_minibatches", "dapo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gspo",
    "cispo", "sapo", "distill", "dpo",
)  # fmt: skip
CONTROL, TAUGHT = "grpo, shuffled", "grpo"
WORDS = {
    CONTROL: ["algorithm=grpo", SHUFFLED],
    "distill": [
        "algorithm=distill", f"algorithm.teacher.model={TAUGHT}", "algorithm.teacher.base_url=http://in.this.process/v1",
    ],
}  # fmt: skip


PAIRS_PER_PROMPT = 4
PREFER = ["experiment=sft_quickstart", "algorithm=dpo", "data=files", "cluster.dashboard=false", "run.loggers=[]"]


class OneRank:
    """A rank as the loop calls all of them."""

    num_ranks = 1

    def __init__(self, rank: TrainerRank) -> None:
        self._rank = rank

    async def forward_backward(self, batches: Sequence[list[list[Sample]]], counts: Denominators) -> list[LossStats]:
        """TrainerRank.forward_backward."""
        return [self._rank.forward_backward(batches[0], counts)]

    async def score(self, batches: Sequence[list[list[Sample]]], policy_version: int) -> list[list[list[Scores]]]:
        """TrainerRank.score."""
        return [self._rank.score(batches[0], policy_version)]

    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        """TrainerRank.optimizer_step."""
        return self._rank.optimizer_step(ends_version=ends_version)


@torch.no_grad()
def sample(rank: TrainerRank, prompts: Sequence[Prompt], n: int, max_tokens: int) -> list[list[Rollout]]:
    """`n` responses of `max_tokens` tokens to each prompt, from the rank's own weights at temperature 1."""
    decoder, version = rank.decoder, rank.policy_version
    rows = [list(prompt.token_ids) for prompt in prompts for _ in range(n)]
    logprobs: list[list[float]] = [[] for _ in rows]
    for _ in range(max_tokens):
        lengths = torch.tensor([len(row) for row in rows])
        ends = lengths.cumsum(0)
        hidden_TH = decoder(
            torch.tensor([token for row in rows for token in row]),
            torch.cat([torch.arange(len(row)) for row in rows]),
            torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        )
        log_p = decoder.apply_head(lambda rows_NH, head_VH: rows_NH @ head_VH.t(), hidden_TH[ends - 1]).log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1)
        for row, own, token, value in zip(
            rows, logprobs, chosen[:, 0].tolist(), log_p.gather(1, chosen)[:, 0].tolist(), strict=True
        ):
            row.append(token)
            own.append(value)
    rollouts = [
        Rollout(row[-max_tokens:], own, [version] * max_tokens, "", "length")
        for row, own in zip(rows, logprobs, strict=True)
    ]
    return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]


def text_of(token_ids: Sequence[int]) -> str:
    """By the character tokenizer; special tokens are no text."""
    first = len(SPECIAL_TOKENS)
    return "".join(ALPHABET[token - first] for token in token_ids if token >= first)


def judged(prompts: Sequence[Prompt], sampled: Sequence[list[Rollout]]) -> list[Group]:
    """Groups with the quick start's reward."""
    return [
        Group(
            prompt,
            rollouts,
            [share_of_answer(prompt.text, text_of(rollout.token_ids), prompt.fields) for rollout in rollouts],
        )
        for prompt, rollouts in zip(prompts, sampled, strict=True)
    ]


def heard(group: Group, teacher: Scorer) -> Group:
    """The group with the teacher's log-probability of each sampled token."""
    rows, _ = teacher.logprobs([[*group.prompt.token_ids, *rollout.token_ids] for rollout in group.rollouts])
    rollouts = [
        replace(rollout, teacher_logprobs=row[-len(rollout.token_ids) :])
        for rollout, row in zip(group.rollouts, rows, strict=True)
    ]
    return replace(group, rollouts=rollouts)


def mean_reward(groups: Sequence[Group]) -> float:
    """The mean reward of all responses; those without a reward are left out."""
    return float(np.mean([reward for group in groups for reward in group.rewards if reward is not None]))


class Policy:
    """A trainer rank, and the held-out prompts that it is asked.

    Args:
        folder: Of the model; empty before.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        torch.manual_seed(config.run.seed)
        self.hf_config = prepare_model(config.model, folder).hf_config
        self._config, self.prompts = config, PromptRows(config, TextEncoder(folder))
        self._held_out = [prompt for part in self.prompts.held_out().values() for prompt in part]
        self.rank = TrainerRank(
            TrainerOptions(
                model=config.model,
                trainer=config.trainer,
                algorithm=config.algorithm,
                sampling_temperature=1.0,
                weight_sync=config.weight_sync,
                seed=config.run.seed,
                num_steps=config.run.num_steps * config.algorithm.updates_per_step,
                world_size=1,
                rendezvous="",
                device="cpu",
                hf_config=self.hf_config,
                sync_key=b"nobody connects",
                parity=config.parity,
            )
        )
        self.rank.load()

    def evaluate(self) -> float:
        """The mean held-out reward."""
        n, max_tokens = self._config.run.eval_samples_per_prompt, self._config.rollout.sampling.max_tokens
        return mean_reward(judged(self._held_out, sample(self.rank, self._held_out, n, max_tokens)))


async def learn(config: RunConfig, folder: Path, adapter: Path, taught: Path | None) -> dict[str, Any]:
    """One run. Returns its figures.

    Args:
        folder: Of the model; empty before.
        adapter: Where what was learned goes.
        taught: The teacher's adapter; None: there is no teacher.
    """
    policy = Policy(config, folder)
    rank, prompts = policy.rank, policy.prompts.stream()
    algorithm, max_tokens = config.algorithm, config.rollout.sampling.max_tokens
    teacher = None
    if taught is not None:
        lora = replace(config.trainer.lora, init_from=str(taught))
        teacher = Scorer(
            config.model, replace(config.trainer, lora=lora), policy.hf_config, seed=config.run.seed, device="cpu"
        )
    trainer, rng = OneRank(rank), np.random.default_rng(config.run.seed)
    advantages_of = advantage_function(algorithm)

    def next_batch() -> list[Group]:
        drawn = [next(prompts) for _ in range(algorithm.groups_per_step)]
        groups = judged(drawn, sample(rank, drawn, algorithm.group_size, max_tokens))
        return groups if teacher is None else [heard(group, teacher) for group in groups]

    first, started, clipped = policy.evaluate(), time.monotonic(), []
    waiting = next_batch()
    for _ in range(config.run.num_steps):
        groups, waiting = waiting, next_batch()  # of the version before, but for the first
        drafts = draft_samples(groups, algorithm)
        if algorithm.scores_first:
            drafts = await score(trainer, drafts, config, rank.policy_version)  # pyright: ignore[reportArgumentType]
        of_groups = filled(drafts, groups, algorithm, advantages_of)
        done = await update(
            trainer,  # pyright: ignore[reportArgumentType]
            of_groups, config, rank.policy_version, rng, Stopwatch(),
        )  # fmt: skip
        clipped.append(float(loss_metrics(done.loss)["loss/clip_fraction"] or 0))
    seconds = time.monotonic() - started
    result = {
        "held_out_first": first,
        "held_out_last": policy.evaluate(),
        "steps": config.run.num_steps,
        "versions": rank.policy_version,
        "updates_per_step": algorithm.updates_per_step,
        "clip_fraction": float(np.mean(clipped)),
        "seconds": seconds,
    }
    rank.states.save_adapter(adapter)
    rank.shutdown()
    return result


def write_pairs(folder: Path, seed: int) -> list[str]:
    """The quick start's prompts with pairs of answers. Returns the options that name the files."""
    rng, first = random.Random(seed), load_run_config(["experiment=quickstart"])
    known = ALPHABET[: first.model.hf_config["vocab_size"] - len(SPECIAL_TOKENS)].replace(" ", "").replace("\n", "")
    for part, path, repeats in (("train", first.data.path, PAIRS_PER_PROMPT), ("heldout", first.data.eval_path, 1)):
        rows = [row.columns for row in read_rows(str(path))] * repeats
        pairs = [
            {"prompt": row["prompt"], "chosen": row["answer"] * 4, "rejected": "".join(rng.choices(known, k=4))}
            for row in rows
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/heldout.jsonl"]


def prefer(fixed: list[str], further: list[str], folder: Path) -> dict[str, Any]:
    """`dpo`: a run of the command line, whose adapter is then asked. Returns its figures."""
    folder.mkdir()
    asked = load_run_config(fixed)
    first = Policy(asked, folder / "model")
    before = first.evaluate()
    first.rank.shutdown()
    own = [word for word in fixed if not word.startswith("experiment=")]
    words = [*PREFER, *own, *write_pairs(folder, asked.run.seed), *further]
    run_folder, seconds = runs.train("dpo", words, folder / "runs")
    lora = replace(asked.trainer.lora, init_from=str(run_folder / "adapter"))
    taught = Policy(replace(asked, trainer=replace(asked.trainer, lora=lora)), folder / "model")
    result = {
        "held_out_first": before,
        "held_out_last": taught.evaluate(),
        "steps": asked.run.num_steps,
        "versions": asked.run.num_steps,
        "updates_per_step": 1,
        "clip_fraction": 0.0,
        "seconds": seconds,
    }
    taught.rank.shutdown()
    return result


def main() -> None:
    """The named presets, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=[*PRESETS, CONTROL], metavar="PRESET")
    parser.add_argument("--set", nargs="*", default=[], help="further options for every run, e.g. algorithm.kl_coef=0")
    parser.add_argument("--steps", type=int, default=110, help="optimizer steps of each, as in the quick start")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "algorithms-cpu.json")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(args.commit), "presets": {}}
    print(json.dumps(report["environment"], indent=2))
    if args.out.exists():  # keep what was measured on the same commit
        before = json.loads(args.out.read_text())
        if before["environment"] == report["environment"]:
            report["presets"] = before["presets"]
    if "distill" in args.presets and TAUGHT not in args.presets[: args.presets.index("distill")]:
        parser.error(f"the teacher of distill is what {TAUGHT} made: name {TAUGHT} before it")
    fixed = ["experiment=quickstart", f"run.num_steps={args.steps}", "trainer.num_ranks=1", "trainer.ep_size=1"]
    scratch = tempfile.TemporaryDirectory()
    for name in args.presets:
        of_run, taught = Path(scratch.name) / name, Path(scratch.name) / TAUGHT / "adapter"
        if name == "dpo":
            found = prefer(fixed, args.set, of_run)
        else:
            config = load_run_config([*fixed, *WORDS.get(name, [f"algorithm={name}"]), *args.set])
            teacher = taught if config.algorithm.distill_coef > 0 else None
            found = asyncio.run(learn(config, of_run / "model", of_run / "adapter", teacher))
        report["presets"][" ".join([name, *args.set])] = found
        args.out.write_text(json.dumps(report, indent=2) + "\n")
        print(
            f"{name:24} held out {found['held_out_first']:.3f} -> {found['held_out_last']:.3f}   "
            f"{found['versions']} versions of {found['updates_per_step']} updates, clipped "
            f"{found['clip_fraction']:.3%}, {found['seconds']:.0f} s",
            flush=True,
        )
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
