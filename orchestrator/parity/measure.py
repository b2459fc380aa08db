"""`slipstream parity`, measured: who agrees with whom about the sampled tokens, and where trainer and engine part.

    checkpoint --engine_side--> sequences, log-probabilities twice, recorded activations
         |                          |                                   |
         +--trainer.scoring-------> log-probabilities of the same       +--> each operation alone, on the engine's
         |                          |                                   |    inputs (compare.py)
         +--transformers----------> the same, if asked                  +--> k3 with one block's output taken from
                                                                             the engine
Owns: the order (a device holds one model at a time), and the report. Does not own: what a difference is (compare.py),
words and pictures (report.py).
"""

import gc
import logging
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.conf.architecture.families import kind_of, of_language_model
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Device, Init, RunConfig
from slipstream.orchestrator.files.outputs import output_in
from slipstream.orchestrator.inputs.model_files import read_hf_config
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config, routing_shape
from slipstream.orchestrator.parity.compare import (
    Difference,
    against,
    agreement,
    difference,
    routing_difference,
    verdict,
)
from slipstream.orchestrator.parity.engine_side import Sampled, sample_and_record
from slipstream.orchestrator.parity.progress import Count, Say, telling
from slipstream.rollout.types import EngineOptions
from slipstream.trainer.model.comparison import run_chained, run_isolated
from slipstream.trainer.model.operations import Operation
from slipstream.trainer.scoring import Scorer

_BLOCKS = (".self_attn.o_proj", ".mlp")
"""How the outputs of a layer's blocks end."""


@dataclass(frozen=True, slots=True)
class Swap:
    """k3 between engine and trainer over the recorded sequences when one block's output is the engine's."""

    block: str
    """Example: "layers.3.mlp"; "" where nothing is swapped, "self_attn" where all attention blocks are."""
    k3_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What comparing operations found."""

    differences: list[Difference]
    chained: dict[str, float]
    """Relative difference of the residual stream at each layer when each side goes its own way."""
    swaps: list[Swap]
    flipped: float | None
    """Share of routings of the recorded tokens that differ when each side goes its own way; None without experts."""
    sentence: str
    agrees: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport(Layers):
    model: str
    device: str
    dtype: str
    num_prompts: int
    max_tokens: int
    entropy: float
    """Mean over sampled tokens, by the trainer, in nats."""
    matrix: dict[str, dict[str, float]]
    """Figures of each pair (compare.agreement), by "sampler, other"."""

    def as_plain(self) -> JsonObject:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked beside the run's options."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    num_recorded: int
    """Sequences whose operations are compared."""
    with_transformers: bool = False
    usual: dict[str, float] | None = None
    """`relative` by tensor of an earlier report."""


def measure(config: RunConfig, device: Device, question: Question, engine_log: Path, say: Say) -> ParityReport:
    """Run everything, one model on the device at a time.

    Args:
        engine_log: Gets what the engine's processes write.
        say: Told what begins, and how far it is.
    """
    hf_config = resolve_hf_config(config.model)
    with tempfile.TemporaryDirectory(prefix="slipstream-parity-") as name:
        temporary = Path(name)
        folder = _engine_folder(config, hf_config, device, temporary / "checkpoint", say)
        activations = temporary / "activations.safetensors"
        with output_in(engine_log):
            options = EngineOptions(
                folder=folder,
                config=config.rollout,
                dtype=config.model.dtype,
                device=device,
                routing=routing_shape(config, hf_config),
                batch_invariant=config.is_bitwise,
            )
            sampled = sample_and_record(
                options,
                question.prompts,
                seed=config.run.seed,
                max_tokens=question.max_tokens,
                num_recorded=question.num_recorded,
                activations=activations,
                say=say,
            )
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it logs to stdout, where --json goes
        others: dict[str, list[Tensor]] = {}
        if question.with_transformers:
            others["transformers"] = hf_logprobs(folder, str(config.model.dtype), device, sampled, say)
        say("trainer: load")
        with _freed(device):
            scorer = Scorer(config.model, config.trainer, hf_config, seed=config.run.seed, device=str(device))
            scores, entropy = _trainer_scores(scorer, sampled, say)
            others |= scores
            recorded = sampled[: question.num_recorded]
            layers = compare_layers(scorer, recorded, read_tensors(activations), question.usual, say)
            del scorer
    return ParityReport(
        model=config.model.path or kind_of(hf_config),
        device=str(device),
        dtype=str(config.model.dtype),
        num_prompts=len(question.prompts),
        max_tokens=question.max_tokens,
        entropy=sum(entropy) / len(entropy),
        matrix=agreements(sampled, others),
        **{item.name: getattr(layers, item.name) for item in fields(layers)},
    )


def _trainer_scores(
    scorer: Scorer, sampled: Sequence[Sampled], say: Say
) -> tuple[dict[str, list[Tensor]], list[float]]:
    """(log-probabilities of each response, by who computed them; the entropy at each of their tokens)."""
    sequences = [one.token_ids for one in sampled]
    routes = [(one.routes.experts, one.routes.is_recorded) for one in sampled if one.routes is not None]
    total = len(sequences) * (2 if routes else 1)
    with telling(say, "trainer: score", lambda: f"{scorer.num_scored} of {total} sequences"):
        rows, entropies = scorer.logprobs(sequences)
        found = {"trainer": responses_of(sampled, rows)}
        if routes:
            rows, _ = scorer.logprobs(sequences, routes)
            found["trainer, routes replayed"] = responses_of(sampled, rows)
    return found, [value for one, row in zip(sampled, entropies, strict=True) for value in one.response_of(row)]


def responses_of(sampled: Sequence[Sampled], rows: Sequence[Sequence[float]]) -> list[Tensor]:
    """Take from each sequence's values, one per token but the first, those of its response."""
    return [torch.tensor(one.response_of(row)) for one, row in zip(sampled, rows, strict=True)]


def agreements(sampled: Sequence[Sampled], others: dict[str, list[Tensor]]) -> dict[str, dict[str, float]]:
    """The matrix: the engine against its own prefill (the floor), against the others, and the others among themselves.

    Args:
        sampled: The engine's side.
        others: Log-probabilities of each response, by who computed them.
    """
    engine = torch.tensor([value for one in sampled for value in one.decoded])
    sides = {"engine prefill": torch.tensor([value for one in sampled for value in one.prefilled])}
    sides |= {name: torch.cat(rows) for name, rows in others.items()}
    matrix = {f"engine, {name}": agreement(engine, values) for name, values in sides.items()}
    for first, second in pairwise(others):
        matrix[f"{first}, {second}"] = agreement(sides[first], sides[second])
    return matrix


def compare_layers(
    scorer: Scorer,
    recorded: Sequence[Sampled],
    activations: dict[str, Tensor],
    usual: dict[str, float] | None = None,
    say: Say = lambda part: None,
) -> Layers:
    """Compare every operation on the engine's inputs, then the whole way, then with one block taken from the engine.

    Args:
        scorer: The trainer's side.
        recorded: The sequences whose prefill was recorded.
        activations: What was recorded, by name.
        usual: `relative` by tensor of an earlier comparison.
        say: Told what begins, and how far it is.
    """
    sequences = [one.token_ids for one in recorded]
    operations = scorer.operations(sequences)
    given = {name: tensor.to(scorer.device) for name, tensor in activations.items()}
    given["token_ids"] = torch.tensor([token for one in sequences for token in one], device=scorer.device)
    isolated = Count(len(operations))
    with telling(say, "trainer: each operation on the engine's inputs", lambda: str(isolated)):
        found = isolated_differences(operations, given, usual, isolated)
    without: list[Difference] = []
    if scorer.decoder.lora is not None:
        isolated.done = 0
        with telling(say, "trainer: the same without adapters", lambda: str(isolated)):
            without = isolated_differences(scorer.operations(sequences, adapted=False), given, usual, isolated)
    own = run_chained(operations, given)
    engine = torch.tensor([value for one in recorded for value in one.prefilled])
    is_response = torch.cat([torch.arange(1, len(one.token_ids)) >= one.num_prompt for one in recorded])

    def k3_of(tensors: dict[str, Tensor]) -> float:
        logprobs = scorer.logprobs_of_hidden(tensors["norm"], sequences).cpu()
        return agreement(engine, logprobs[is_response])["k3_mean"]

    blocks = [name for name in given if name.endswith(_BLOCKS) and name in own]
    wanted = {_block(kind[1:]): [name for name in blocks if name.endswith(kind)] for kind in _BLOCKS}
    by_layer = sorted(blocks, key=lambda name: (int(name.split(".")[1]), name.endswith(".mlp")))
    wanted |= {_block(name): [name] for name in by_layer}
    swaps, passes = [Swap("", k3_of(own))], Count(len(wanted))
    with telling(say, "trainer: the whole model with one block's output from the engine", lambda: f"{passes} passes"):
        for block, names in wanted.items():
            swaps.append(Swap(block, k3_of(run_chained(operations, given, names))))
            passes.done += 1
    streams = [name for name in own if name.endswith(".stream") and name in given]
    sentence, agrees = verdict(found, without)
    return Layers(
        differences=found,
        chained={name: difference(name, name, given[name], own[name]).relative for name in streams},
        swaps=swaps,
        flipped=_flipped(own, given),
        sentence=sentence,
        agrees=agrees,
    )


def isolated_differences(
    operations: list[Operation],
    given: dict[str, Tensor],
    usual: dict[str, float] | None = None,
    count: Count | None = None,
) -> list[Difference]:
    """Each operation on the engine's inputs against the engine's output. `count` counts them."""
    found: list[Difference] = []
    for operation, outputs in run_isolated(operations, given):
        if count is not None:
            count.done += 1
        names = operation.outputs
        if names[-1].endswith("topk_ids"):
            found.append(
                routing_difference(operation.name, (given[names[0]], given[names[1]]), (outputs[0], outputs[1]))
            )
            continue
        pairs = zip(names, outputs, strict=True)
        found += [difference(operation.name, name, given[name], out) for name, out in pairs if name in given]
    return against(found, usual)


def read_tensors(file: Path) -> dict[str, Tensor]:
    opened: Any = safe_open(file, framework="pt")
    names: list[str] = opened.keys()
    return {name: opened.get_tensor(name) for name in names}


def hf_logprobs(folder: Path, dtype: str, device: Device, sampled: Sequence[Sampled], say: Say) -> list[Tensor]:
    """Log-probabilities of each response by transformers, eager attention, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    say("transformers: load")
    with _freed(device):
        model = loader.from_pretrained(folder, dtype=getattr(torch, dtype)).to(str(device)).eval()
        rows: list[Tensor] = []
        with telling(say, "transformers: score", lambda: f"{len(rows)} of {len(sampled)} sequences"), torch.no_grad():
            for one in sampled:
                ids = torch.tensor([one.token_ids], device=str(device))
                logits = model(ids).logits[0, one.num_prompt - 1 : -1].float()
                rows.append(logits.log_softmax(-1).gather(1, ids[0, one.num_prompt :, None])[:, 0].cpu())
        del model
    return rows


def _engine_folder(config: RunConfig, hf_config: JsonObject, device: Device, made: Path, say: Say) -> Path:
    """The checkpoint that the engine loads: the model's own where the trainer computes with exactly that, and the
    engine would not build a vision tower."""
    lora, own = config.trainer.lora, Path(config.model.path or "")
    if config.model.init is Init.checkpoint and lora.init_from is None:
        stored = read_hf_config(own, "model.path")
        if of_language_model(stored) is stored:
            return own
    say("trainer: write what it computes with as a checkpoint for the engine")
    with _freed(device):
        scorer = Scorer(
            config.model, config.trainer, hf_config, seed=config.run.seed, device=str(device),
            rounding_seed=config.rounding_seed,
        )  # fmt: skip
        scorer.save(made)
        del scorer
    return made


def _block(name: str) -> str:
    return name.removesuffix(".o_proj")


def _flipped(own: dict[str, Tensor], given: dict[str, Tensor]) -> float | None:
    """Share of routings that are not among the engine's, over all layers."""
    names = [name for name in own if name.endswith("topk_ids") and name in given]
    if not names:
        return None
    shares = [~(own[name][:, :, None] == given[name][:, None, :]).any(-1) for name in names]
    return float(torch.stack(shares).double().mean())


@contextmanager
def _freed(device: Device) -> Generator[None]:
    """Give the device's memory back after the block, whose names must be gone by then."""
    yield
    gc.collect()
    if device is Device.cuda:
        torch.cuda.empty_cache()
