"""What each process of the parallel tests runs. One set of processes serves many scenarios."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cases.processes import run_processes
from cases.tiny_configs import MIXED
from cases.tiny_models import base_logits_of, draw_b, logits_of, make_decoder, packed, probe_loss, trainer_config
from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Activations, LoraConfig, NumericsConfig, TrainMode
from slipstream.trainer.adapter_io import all_experts, load_adapter, save_adapter, save_merged
from slipstream.trainer.model import whole_weights
from slipstream.trainer.model.build_decoder import build_decoder, dense_trainable, expert_trainable
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.parallel import ParallelLayout, gather_wholes, local_part, whole
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.weights.loading import CheckpointReader, RandomReader, load_weights
from slipstream.trainer.weights.shards import local_shards, sharded_lora_a
from slipstream.weight_sync.layout import Region


@dataclass(frozen=True)
class Scenario:
    """One model on one layout, with each rank's sequences (indices into `lengths`)."""

    name: str
    ep_size: int
    sequences: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = (7, 1, 12, 4)
    mode: TrainMode = TrainMode.lora
    hf_config: dict[str, Any] | None = None
    checkpointing: bool = True
    dtype: torch.dtype = torch.float32
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    is_whole: bool = False
    """Whether dense parameters are gathered once a call, and not layer by layer."""

    def decoder(self, layout: ParallelLayout | None = None) -> Decoder:
        """The same weights on any layout."""
        config = trainer_config(
            self.mode,
            train_router=self.mode is TrainMode.full,
            activations=Activations("recompute" if self.checkpointing else "keep"),
            numerics=self.numerics,
            num_ranks=layout.world_size if layout else 1,
            ep_size=layout.ep_size if layout else 1,
        )
        device = layout.device if layout else "cpu"
        made = make_decoder(
            self.hf_config or MIXED, config, layout=layout, dtype=self.dtype, device=device, may_be_whole=self.is_whole
        )
        assert (made.whole is not None) == (self.is_whole and layout is not None)
        return made

    def batch(self, sequences: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Some of the scenario's sequences, packed."""
        parts = [packed((length,), seed=index) for index, length in enumerate(self.lengths)]
        chosen = [parts[index] for index in sequences]
        empty = torch.zeros(0, dtype=torch.int64)
        ends = torch.tensor([0, *(len(part[0]) for part in chosen)]).cumsum(0)
        return torch.cat([p[0] for p in chosen] or [empty]), torch.cat([p[1] for p in chosen] or [empty]), ends


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Collective: whole gradients by name, experts stacked over all of them."""
    grads = {}
    for name, parameter in dense_trainable(decoder):
        assert parameter.grad is not None, name
        grads[name] = whole(parameter.grad)
    for name, parameter in expert_trainable(decoder):
        assert parameter.grad is not None, name
        grads[name] = all_experts(decoder, parameter.grad)
    return grads


def sum_of_local_squares(decoder: Decoder) -> Tensor:
    """What a rank adds to the squared gradient norm."""
    trainable = dense_trainable(decoder) + expert_trainable(decoder)
    return torch.stack(
        [local_part(p.grad)[0].double().square().sum() for _, p in trainable if p.grad is not None]
    ).sum()


def train_once(scenario: Scenario, layout: ParallelLayout) -> dict[str, Any]:
    """Logits of this rank's sequences, whole gradients, and the squared norm."""
    decoder = scenario.decoder(layout)
    trainable = dense_trainable(decoder) + expert_trainable(decoder)  # taken once, as the optimizer does
    token_ids, positions, cu_seqlens = scenario.batch(scenario.sequences[layout.rank])
    batch = (token_ids.to(layout.device), positions.to(layout.device), cu_seqlens)
    with decoder.in_use():
        logits = logits_of(decoder, batch)
        probe_loss(logits, batch[0]).backward()
    grads = gradients(decoder)
    squares = sum_of_local_squares(decoder)
    dist.all_reduce(squares)

    # A second backward adds to the first. A forward without a backward leaves nothing stale for the next step.
    with decoder.in_use():
        probe_loss(logits_of(decoder, batch), batch[0]).backward()
    twice = gradients(decoder)
    if decoder.whole is not None:
        fail_once(decoder, batch)
    assert trainable == dense_trainable(decoder) + expert_trainable(decoder), "modules have rows again"
    with torch.no_grad():
        with decoder.in_use():
            base_logits_of(decoder, batch)
        for _, parameter in trainable:
            local_part(parameter)[0].mul_(1.25)
        with decoder.in_use():
            moved = logits_of(decoder, batch)
    out = {"logits": logits.detach(), "grads": grads, "squares": squares, "twice": twice, "moved": moved}
    return {name: _to_cpu(value) for name, value in out.items()}


def fail_once(decoder: Decoder, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Nothing of a call that fails is in gradients of dense parameters, nor in the next call's."""
    own = [parameter for _, parameter in dense_trainable(decoder)]
    before = [local_part(one.grad)[0].clone() for one in own if one.grad is not None]
    with suppress(ZeroDivisionError), decoder.in_use():
        probe_loss(logits_of(decoder, batch), batch[0]).backward()
        raise ZeroDivisionError
    after = [local_part(one.grad)[0] for one in own if one.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert decoder.whole is not None
    assert all(one.grad is None for one in decoder.whole.trainable)


def _to_cpu(value: Any) -> Any:
    return {name: one.cpu() for name, one in value.items()} if isinstance(value, dict) else value.cpu()


def reference(scenario: Scenario) -> dict[str, Any]:
    """The same on one rank that has all sequences, rank after rank."""
    torch.set_num_threads(1)  # as the ranks do: a matrix product's bits depend on it
    decoder = scenario.decoder()
    batch = scenario.batch(tuple(index for rank in scenario.sequences for index in rank))
    logits = logits_of(decoder, batch)
    probe_loss(logits, batch[0]).backward()
    grads = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    squares = sum_of_local_squares(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
    return {"logits": logits.detach(), "grads": grads, "squares": squares, "moved": logits_of(decoder, batch).detach()}


def files(folder: Path, ep_size: int, world_size: int, rank: int, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Everything that reads or writes files, and what the ranks hold."""
    out = folder / f"world{world_size}_ep{ep_size}"
    layout = ParallelLayout.create(world_size, ep_size, rank, "cpu")
    spec = read_config(hf_config)
    lora = LoraConfig(rank=6, alpha=12.0)  # which two ranks cut evenly, and four do not
    config = trainer_config(num_ranks=world_size, ep_size=ep_size, lora=lora)
    decoder = build_decoder(
        spec, dtype=torch.bfloat16, device="cpu", trainer=config, layout=layout, rounding_seed=5
    )  # fmt: skip
    load_weights(decoder, RandomReader(spec, seed=11, std=0.05, device="cpu"), seed=11)
    draw_b(decoder)
    save_adapter(decoder, out / "adapter")
    save_merged(decoder, out / "merged", hf_config)
    before = {name: local_part(p)[0].clone() for name, p in decoder.named_parameters()}
    with torch.no_grad():
        for parameter in decoder.parameters():
            local_part(parameter)[0].fill_(torch.nan)
    # Rank slices from the merged model's files, adapters from the adapter's.
    report = load_weights(decoder, CheckpointReader(out / "merged", spec), seed=0)
    load_adapter(decoder, out / "adapter")
    restored = all(
        torch.equal(local_part(p)[0], before[name]) for name, p in decoder.named_parameters() if "lora_" in name
    )
    slices: dict[str, tuple[Region, Tensor]] = {}
    for held in local_shards(decoder):
        values = torch.empty(held.region.shape, dtype=held.base.dtype)
        replace(held, delta=None).run(held.region).write(values, {})  # the base alone, in the checkpoint's layout
        slices[held.tensor] = (held.region, values)
    sharded = sharded_lora_a(decoder)
    gathered = {key: a.to_local().new_empty(a.shape) for key, a in sharded.items()}
    with torch.no_grad():
        gather_wholes(list(sharded.values()), list(gathered.values()))
    return {"restored": restored, "slices": slices, "gathered_a": gathered, "report": report}


def _main(
    rank: int, world_size: int, folder: str, scenarios: list[Scenario], file_models: list[Any], device_type: str
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    whole_weights.BUCKET_BYTES = 1 << 14  # of many parameters more than one is summed at a time
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        results: dict[str, Any] = {}
        for scenario in scenarios:
            layout = ParallelLayout.create(world_size, scenario.ep_size, rank, device)
            results[scenario.name] = train_once(scenario, layout)
        for ep_size, hf_config in file_models:
            results[f"files_ep{ep_size}"] = files(Path(folder), ep_size, world_size, rank, hf_config)
        torch.save(results, f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(
    world_size: int,
    folder: Path,
    scenarios: list[Scenario],
    file_models: list[tuple[int, dict[str, Any]]],
    device_type: str = "cpu",
) -> list[dict[str, Any]]:
    """Results of every rank, by scenario name."""
    folder.mkdir(parents=True, exist_ok=True)
    run_processes(_main, (world_size, str(folder), scenarios, file_models, device_type), world_size)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def join_again(rank: int, world_size: int, folder: str, ep_sizes: list[int], device_type: str) -> None:
    """A process that joins once for every layout; each makes one exchange."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for number, ep_size in enumerate(ep_sizes):
        control = ControlGroup(rank, world_size, f"file://{folder}/meeting{number}", device)
        layout = ParallelLayout.create(world_size, ep_size, rank, device)
        total = torch.full((1,), rank + 1, device=device)
        dist.all_reduce(total, group=layout.ep_group)
        assert int(total) == sum(range(1, world_size + 1))
        control.leave()
