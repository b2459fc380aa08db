"""Locks: a real pretrained model learns from answers, from pairs and from rewards, one run going on from the other's
adapter; and what was exported computes, in PEFT and in vLLM, what the run reported. The example learns its task.

    base --SFT--> adapter --DPO--> adapter --GRPO--> adapter, samples.jsonl
                     |                |                 |
              held-out nll     held-out loss     log-probabilities of sampled tokens

Everything is in bfloat16, as users have it. What is compared with what:

- SFT and DPO report the held-out loss of the trainer's own forward pass. PEFT computes it of the exported adapters
  beside the base, in float32.
- GRPO reports the engine's log-probabilities. Its engine has the merged weights W + s B A, rounded to bfloat16, which
  loses updates that are smaller than half a unit of a weight's last place; so the engine is compared with those weights
  (`slipstream merge` writes the same) as well as with the exported adapter beside its base, unmerged: in PEFT and in
  vLLM. What merging loses is the difference of the two, and has to stay within the same bound.

The bound. Rounding to bfloat16 is off by 2^-9 of a number at most, by 2^-9 / sqrt(3) of standard deviation. The
residual stream is rounded twice in each of 30 layers, independently: sqrt(60) 2^-9 / sqrt(3) = 0.9 % of it. A logit is
the stream times a row of the head, so its error is 0.9 % of the logits' size, which is about 10 in this model: NOISE =
0.09 nats for one token. Norms, projections and attention round, too; what they add to the stream is small beside it.
Up to three such errors, which are independent, are between two sides: of the run's engine, of the weights that were
rounded for it, and of the other engine. A trainer differs from PEFT in float32 by one.
"""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from system.conftest import train
from torch import Tensor

from examples.real_model.make_model import make_model
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.files.row_files import read_rows

ROOT = Path(__file__).parents[2]
NOISE = 0.09
COMMON = [
    "experiment=quickstart", "model=checkpoint", "trainer.num_ranks=1", "trainer.ep_size=1", "data=files",
    "trainer.lora.rank=8", "trainer.lora.alpha=16", "trainer.optim.lr=1e-3", "run.eval_every_steps=100",
    "run.checkpoint_every_steps=0", "trainer.max_microbatch_tokens=1024",
]  # fmt: skip
GIVEN = ["data.max_sequence_tokens=128", "algorithm.sequences_per_step=8"]
Row = dict[str, Any]
pytestmark = pytest.mark.timeout(3600)


def rows(num_rows: int, seed: int) -> list[Row]:
    """Sums of two numbers, which the base answers in whole sentences."""
    draw = random.Random(seed)
    pairs = [(draw.randint(2, 40), draw.randint(2, 40)) for _ in range(num_rows)]
    return [
        {
            "prompt": (asked := [{"role": "user", "content": f"What is {a} + {b}?"}]),
            "messages": [*asked, {"role": "assistant", "content": f"The sum: {a + b}"}],
            "answer": f"The sum: {a + b}",
            "chosen": f"The sum: {a + b}",
            "rejected": f"The sum: {a + b + draw.choice([-1, 1])}",
        }
        for a, b in pairs
    ]


@pytest.fixture(scope="module")
def base() -> Path:
    return make_model(ROOT / "build" / "smollm2-135m-instruct")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    for name, num_rows, seed in (("train", 64, 1), ("held_out", 8, 2)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(num_rows, seed)))
    return [f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/held_out.jsonl"]


def run_of(words: list[str], folder: Path) -> tuple[Path, Row]:
    """A run to its end: its folder, and the last row of its metrics."""
    run = train([*COMMON, *words], folder)
    assert run.exit_code == 0, run.stderr
    return run.folder, run.rows[-1]


@pytest.fixture(scope="module")
def tuned(base: Path, data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Row]:
    words = ["algorithm=sft", *GIVEN, "run.num_steps=6"]
    return run_of([*words, *data, f"model.path={base}"], tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def preferring(
    base: Path, data: list[str], tuned: tuple[Path, Row], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Row]:
    words = ["algorithm=dpo", *GIVEN, "run.num_steps=3", f"trainer.lora.init_from={tuned[0]}/adapter"]
    return run_of([*words, *data, f"model.path={base}"], tmp_path_factory.mktemp("dpo"))


@pytest.fixture(scope="module")
def rewarded(
    base: Path, data: list[str], preferring: tuple[Path, Row], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Row]:
    words = [
        "reward=exact_match", "rollout.num_workers=1", "rollout.max_model_len=128", "data.max_prompt_tokens=64",
        "rollout.sampling.max_tokens=16", "rollout.sampling.stop_at_eos=true", "algorithm.groups_per_step=2",
        "algorithm.group_size=4", "run.num_steps=2", "run.samples_per_step=100", "run.eval_every_steps=2",
        f"trainer.lora.init_from={preferring[0]}/adapter",
    ]  # fmt: skip
    return run_of([*words, *data, f"model.path={base}"], tmp_path_factory.mktemp("grpo"))


def of_peft(base: Path, adapter: Path | None = None) -> Any:
    """transformers and PEFT in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(base, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probability of each token of the response."""
    logits_TV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def encoded(base: Path, messages: list[Row], answer: str) -> tuple[list[int], list[int]]:
    """The prompt, and what the template makes of the answer, up to the token that ends it: a line feed follows, which
    is not taught."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], tokenize=False)
    ids: list[list[int]] = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in (prompt, whole)]
    assert ids[1][: len(ids[0])] == ids[0]
    return ids[0], ids[1][len(ids[0]) : ids[1].index(tokenizer.eos_token_id, len(ids[0])) + 1]


def sampled(run: Path, base: Path) -> list[tuple[int, list[int], list[int], Tensor]]:
    """From each row of samples.jsonl: the version, prompt, response, and the reported log-probabilities."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    found: list[tuple[int, list[int], list[int], Tensor]] = []
    for line in (run / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        found.append((row["versions"][0][0], prompt, row["token_ids"], torch.tensor(row["rollout_logprobs"])))
    return found


def rms(differences: list[Tensor]) -> float:
    return float(torch.cat(differences).square().mean().sqrt())


def test_what_sft_reports_is_what_peft_computes_of_its_adapter(base: Path, tuned: tuple[Path, Row]) -> None:
    nll: list[list[Tensor]] = []
    for model in (of_peft(base, tuned[0] / "adapter"), of_peft(base)):
        nll.append([-logprobs(model, *encoded(base, row["prompt"], row["answer"])) for row in rows(8, 2)])
    own, of_base = (float(torch.cat(one).mean()) for one in nll)
    print(f"held-out nll: reported {tuned[1]['eval/nll']:.4f}, PEFT {own:.4f}, base {of_base:.4f}")
    # Three standard deviations of a mean of so many errors.
    assert tuned[1]["eval/nll"] == pytest.approx(own, abs=3 * NOISE / math.sqrt(len(torch.cat(nll[0]))))
    assert of_base - own > 10 * NOISE, "an adapter that is not read would be noticed"


def test_what_dpo_reports_is_what_peft_computes_of_both_adapters(
    base: Path, tuned: tuple[Path, Row], preferring: tuple[Path, Row]
) -> None:
    margins: list[Tensor] = []
    for run in (preferring, tuned):
        model = of_peft(base, run[0] / "adapter")
        margins.append(
            torch.stack(
                [
                    logprobs(model, *encoded(base, row["prompt"], row["chosen"])).sum()
                    - logprobs(model, *encoded(base, row["prompt"], row["rejected"])).sum()
                    for row in rows(8, 2)
                ]
            )
        )
    loss = -torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1])).mean()
    print(f"held-out DPO loss: reported {preferring[1]['eval/dpo_loss']:.4f}, PEFT {float(loss):.4f}")
    # A margin has beta = 0.1 times four sums of some 8 tokens, the loss's slope in it is at most 1, and 8 pairs are
    # averaged: three standard deviations of that.
    assert preferring[1]["eval/dpo_loss"] == pytest.approx(float(loss), abs=3 * 0.1 * NOISE * math.sqrt(4 * 8 / 8))
    assert float((margins[0] - margins[1]).abs().mean()) > 10 * NOISE, "another adapter would be noticed"


def test_what_grpo_reports_is_what_peft_and_vllm_compute_of_its_adapter(
    base: Path, preferring: tuple[Path, Row], rewarded: tuple[Path, Row], tmp_path: Path
) -> None:
    run = rewarded[0]
    every = sampled(run, base)
    last = [one for one in every if one[0] == 2]
    first = [one for one in every if one[0] == 0]
    assert len(last) >= 8 and len(first) >= 8
    assert main(["merge", str(run), "--output", str(tmp_path / "merged")]) == 0
    folders = {"version 0": preferring[0] / "adapter", "version 2": run / "adapter"}
    beside = {
        "PEFT, version 0": (first, of_peft(base, folders["version 0"])),
        "PEFT, version 2": (last, of_peft(base, folders["version 2"])),
        "merged, version 2": (last, of_peft(tmp_path / "merged")),
        "base": (last, of_peft(base)),
    }
    off = {
        name: rms([logprobs(model, prompt, response) - reported for _, prompt, response, reported in samples])
        for name, (samples, model) in beside.items()
    }
    in_vllm = of_vllm(base, run / "adapter", last, tmp_path)
    off["vLLM, version 2"] = rms([own - reported for own, (*_, reported) in zip(in_vllm, last, strict=True)])
    print("rms of log-probabilities against those reported:", {name: round(value, 4) for name, value in off.items()})
    assert max(value for name, value in off.items() if name != "base") < math.sqrt(3) * NOISE
    assert off["base"] > 10 * NOISE, "an adapter that is not read would be noticed"


def test_the_example_learns_on_a_cpu(base: Path, tmp_path: Path) -> None:
    """Seen: 0.34, and 0.73 after 7 steps. A held-out reward is a mean over 128 rows of values from 0 to 1: its standard
    error is 0.044 at most, that of a difference 0.062, so that a run that learns nothing stays below the bound."""
    script = Path(__file__).parents[2] / "examples" / "real_model" / "train.py"
    words = ["run.num_steps=8", "run.eval_every_steps=0", "run.checkpoint_every_steps=0", f"run.dir={tmp_path}"]
    command = [sys.executable, str(script), "cpu", *words, "cluster.dashboard=false"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = [
        row["eval/reward"] for row in read_rows(tmp_path / "latest" / "metrics.jsonl") if row["eval/reward"] is not None
    ]
    print("held out:", rewards)
    assert len(rewards) == 2 and rewards[1] > rewards[0] + 3 * 0.062


IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

base, adapter, samples, answers = sys.argv[1:]
samples = json.load(open(samples))
engine = LLM(base, dtype="bfloat16", max_model_len=128, enable_lora=True, max_lora_rank=8, enforce_eager=True,
             kv_cache_memory_bytes=64 << 20, max_num_seqs=4)
prefixes = [{"prompt_token_ids": prompt + response[:at]} for prompt, response in samples for at in range(len(response))]
# Which tokens are allowed changes none of the log-probabilities that are returned, those of the model.
tokens = [token for _, response in samples for token in response]
asked = [SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[token]) for token in tokens]
outputs = engine.generate(prefixes, asked, lora_request=LoRARequest("mine", 1, adapter))
logprobs = [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
found = [[logprobs.pop(0) for _ in response] for _, response in samples]
json.dump(found, open(answers, "w"))
"""


def of_vllm(
    base: Path, adapter: Path, samples: list[tuple[int, list[int], list[int], Tensor]], folder: Path
) -> list[Tensor]:
    """Of each token of the responses, by an engine of its own that serves the adapter beside the base. It is asked for
    one token after the other, because with adapters vLLM has no log-probabilities of prompts on a CPU.
    """
    given, found = folder / "samples.json", folder / "logprobs.json"
    given.write_text(json.dumps([(prompt, response) for _, prompt, response, _ in samples]))
    words = [sys.executable, "-c", IN_VLLM, str(base), str(adapter), str(given), str(found)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.tensor(one) for one in json.loads(found.read_text())]
