"""Publishes in any order, with whatever goes wrong between them, of each kind of publish and of model.

A machine of hypothesis trains, publishes, leaves engines out, starts them again, breaks links and changes a bit of an
engine's memory, as often as it is told. After each publish every engine that serves it holds the trainer's bytes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport
from fakes.publish import KEY, EndpointThread
from fakes.ranked_engine import RankedEngine
from fakes.vllm_layout import engine_layouts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cases.tiny_configs import DEEPSEEK, DENSE, GPT_OSS, MOE, PACKED
from cases.tiny_models import SpreadReader, draw_b, trainer_config
from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import RemoteMerge, SyncMode, TrainMode, WeightSyncConfig
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.delivery.delivery import Delivery
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.model.build_decoder import build_decoder
from slipstream.trainer.process_group import ControlGroup
from slipstream.trainer.weights.factors import merges_of
from slipstream.trainer.weights.loading import load_weights
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.weight_sync.layout import Region

WHOLE = WeightSyncConfig(timeout_s=20.0)
CHANGES = WeightSyncConfig(timeout_s=20.0, delta_bytes=1 << 18)
FACTORS = WeightSyncConfig(timeout_s=20.0, remote_merge=RemoteMerge.host)
ADAPTERS = WeightSyncConfig(timeout_s=20.0, mode=SyncMode.adapter)
NUM_ENGINES = 2
SMALL, LARGE = 1e-5, 1e-3
"""Steps that change 3 % of the weights, and more than is sent as changes."""
FAULTS = [Fault(refuse=True), Fault(corrupt=True), Fault(drop=True)]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """What is published, and how."""

    model: dict[str, Any]
    sync: WeightSyncConfig
    tp_size: int = 1
    has_split_experts: bool = False
    mode: TrainMode = TrainMode.lora
    quantization: BlockFp8 | None = None


ODD = {**MOE, "hidden_size": 33, "moe_intermediate_size": 33, "num_experts": 5}
"""In FP8 some parameters have an odd number of bytes."""
TIED = {**DENSE, "tie_word_embeddings": True}
KINDS = {
    "whole": Kind(MOE, WHOLE, tp_size=2),
    "whole, split experts": Kind(MOE, WHOLE, tp_size=2, has_split_experts=True),
    "whole, tied": Kind(TIED, WHOLE, tp_size=2),
    "whole, latent attention": Kind(DEEPSEEK, WHOLE),
    "whole, fused experts": Kind(GPT_OSS, WHOLE),
    "whole, block-FP8": Kind(MOE, WHOLE, quantization=BlockFp8()),
    "adapters, INT4 base": Kind({**MOE, "quantization_config": PACKED}, ADAPTERS, tp_size=2),
    "changes": Kind(MOE, CHANGES, tp_size=2),
    "changes, split experts": Kind(MOE, CHANGES, tp_size=2, has_split_experts=True),
    "changes, tied": Kind(TIED, CHANGES, tp_size=2),
    "changes, latent attention": Kind(DEEPSEEK, CHANGES),
    "changes, fused experts": Kind(GPT_OSS, CHANGES),
    "changes, all weights": Kind(DENSE, CHANGES, mode=TrainMode.full),
    "changes, block-FP8": Kind(ODD, CHANGES, quantization=BlockFp8()),
    "factors": Kind(MOE, FACTORS, tp_size=2),
    "factors, split experts": Kind(MOE, FACTORS, tp_size=2, has_split_experts=True),
    "factors, tied": Kind(TIED, FACTORS, tp_size=2),
    "factors, latent attention": Kind(DEEPSEEK, FACTORS),
}


class AnyPublishes(RuleBasedStateMachine):
    kind: ClassVar[Kind]

    def __init__(self) -> None:
        super().__init__()
        kind, self.version, self.num_committed = self.kind, -1, 0
        spec, trainer = read_config(kind.model), trainer_config(kind.mode)
        self.decoder = build_decoder(spec, dtype=torch.bfloat16, device=CPU, trainer=trainer, rounding_seed=3)
        load_weights(self.decoder, SpreadReader(spec), seed=3)
        draw_b(self.decoder)
        self.merges = merges_of(self.decoder) if kind.sync is FACTORS else ()
        self.delivery = Delivery(
            self.decoder, ControlGroup(0, 1, "", CPU), kind.sync, kind.quantization,
            key=KEY, host="127.0.0.1", merges=self.merges,
        )  # fmt: skip
        is_alone = kind.sync is ADAPTERS
        self.oracle = (
            AdapterSource(self.decoder, 0, trainer.lora)
            if is_alone
            else TrainerWeightSource(self.decoder, 0, kind.quantization)
        )
        tensors = self.oracle.layout().tensors
        self.layouts = engine_layouts(
            spec, kind.tp_size, has_split_experts=kind.has_split_experts, tensors=tensors
        )  # fmt: skip
        self.fabric = MemoryFabric()
        self.engines = [self.new_engine() for _ in range(NUM_ENGINES)]
        self.endpoints = [EndpointThread(engine, key=KEY) for engine in self.engines]
        addresses = [one.address for one in self.endpoints]
        self.delivery.connect(addresses, MemoryTransport(self.fabric), addresses if is_alone else ())
        self.num_bytes: list[int] = []
        """How many bytes each publish sent."""
        self.held_last: set[int] = set()
        """Engines that committed the publish before, and so may get changes."""
        self.in_doubt: set[int] = set()
        """Engines of which the last rank's own merge was not proven: it gets every byte from then on."""

    def new_engine(self) -> RankedEngine:
        links = [MemoryTransport(self.fabric) for _ in self.layouts]
        zone = self.kind.sync.delta_bytes
        if not self.merges:
            return RankedEngine(self.layouts, links, landing_bytes=zone)
        base = TrainerWeightSource(self.decoder, 0, is_merged=False)
        base.begin(0)
        made = RankedEngine(self.layouts, links, merges=self.merges, read_base=base.read)
        base.end()
        return made

    def wanted(self) -> dict[str, torch.Tensor]:
        """Every tensor as the trainer has it now, read one by one."""
        self.oracle.begin(0)
        found = {}
        for meta in self.oracle.layout().tensors:
            found[meta.name] = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            self.oracle.read(meta.name, Region((0,) * len(meta.shape), meta.shape), found[meta.name])
        self.oracle.end()
        return found

    @initialize()
    def first(self) -> None:
        self.check(self.publish(()), set(range(NUM_ENGINES)))

    @rule(seed=st.integers(0, 1 << 20), size=st.sampled_from([SMALL, LARGE]))
    @torch.no_grad()
    def step(self, seed: int, size: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.decoder.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)

    @rule(seed=st.integers(0, 1 << 20), missing=st.sampled_from([(), (), (), (1,)]))
    def step_and_publish(self, seed: int, missing: tuple[int, ...]) -> None:
        self.step(seed, SMALL)
        self.check(self.publish(missing), set(range(NUM_ENGINES)) - set(missing))

    @rule(engine=st.integers(0, NUM_ENGINES - 1))
    def restart(self, engine: int) -> None:
        self.endpoints[engine].close()
        self.engines[engine] = self.new_engine()
        self.endpoints[engine] = EndpointThread(self.engines[engine], key=KEY)
        self.delivery.reconnect(engine, self.endpoints[engine].address)
        self.held_last.discard(engine)
        self.in_doubt.discard(engine)

    @rule(
        seed=st.integers(0, 1 << 20), engine=st.integers(0, NUM_ENGINES - 1),
        fault=st.sampled_from(FAULTS), skipped=st.integers(0, 2), size=st.sampled_from([SMALL, LARGE]),
    )  # fmt: skip
    def break_a_link(self, seed: int, engine: int, fault: Fault, skipped: int, size: float) -> None:
        """While it serves, if changes are sent ahead, or once it has paused."""
        self.step(seed, size)
        session = self.engines[engine].links[-1].session
        if not all(receiver.state.is_serving for receiver in self.engines[engine].receivers):
            return  # its session will be another one
        self.fabric.inject(session, *[Fault()] * skipped, fault)
        report = self.publish(())
        is_met = not self.fabric.take_back(session)
        sound = set(range(NUM_ENGINES)) - ({engine} if is_met else set())
        may_be_harmless = fault.drop or (fault.corrupt and self.kind.sync is CHANGES)  # a tile without records
        self.check(report, sound, may_commit={engine} if may_be_harmless else set())

    @rule(seed=st.integers(0, 1 << 20), engine=st.integers(0, NUM_ENGINES - 1), number=st.integers(0, 1 << 20))
    def change_a_bit(self, seed: int, engine: int, number: int) -> None:
        """What an engine's last rank serves. A publish of all bytes mends it; one of less finds it by hash, unless
        the element is written over or merged anew."""
        params = list(self.engines[engine].params[-1].values())
        held = params[number % len(params)].view(-1).view(torch.uint8)
        held[number % len(held)] ^= 1 << number % 8
        self.step(seed, SMALL)
        everybody, takers = set(range(NUM_ENGINES)), self.takers(set(range(NUM_ENGINES)))
        self.check(self.publish(()), everybody - ({engine} & takers), may_commit={engine})
        if self.kind.sync is FACTORS and engine not in self.held_last:
            self.in_doubt.add(engine)

    def takers(self, participants: set[int]) -> set[int]:
        """Whose last rank does not get every byte."""
        if self.kind.sync is FACTORS:
            return participants - self.in_doubt
        return participants & self.held_last if self.kind.sync is CHANGES else set()

    def publish(self, missing: tuple[int, ...]) -> Any:
        self.version += 1
        report = self.delivery.publish(self.version, exclude=missing)
        self.num_bytes.append(report.num_bytes)
        begun = {n for n, one in enumerate(self.engines) if one.receivers[-1].state.epoch == report.epoch}
        takers = self.takers(begun)  # of those to which changes could be sent ahead, if they were
        num_ranks = len(takers) + len(begun if self.kind.sync is FACTORS else takers) * (self.kind.tp_size - 1)
        assert report.num_takers == num_ranks, (report, takers)
        return report

    def check(self, report: Any, sound: set[int], may_commit: set[int] | frozenset[int] = frozenset()) -> None:
        """Those that must have committed have, no other but those that may; and who serves this version, holds it."""
        wanted, committed = self.wanted(), set()
        for number, engine in enumerate(self.engines):
            states = [receiver.state for receiver in engine.receivers]
            serving = [state.is_serving and state.version == self.version for state in states]
            assert all(serving) or not any(serving)
            if all(serving):
                committed.add(number)
                assert not engine.wrong(wanted), f"{self.kind} {number}: committed, and holds other bytes"
        assert sound <= committed <= sound | set(may_commit), (sound, committed, report.replicas)
        self.held_last, self.num_committed = committed, self.num_committed + len(committed)

    def teardown(self) -> None:
        self.check(self.publish(()), set(range(NUM_ENGINES)))
        self.delivery.close()
        for endpoint in self.endpoints:
            endpoint.close()


def publish_in_a_row(name: str, num_publishes: int, seed: int) -> None:
    """So many publishes of a kind to the same engines: most are as they should be, and after some steps something is
    done to an engine."""
    draw, machine = random.Random(seed), machine_of(name)()
    machine.first()
    while machine.version < num_publishes - 1:
        number, engine, chance = draw.randrange(1 << 20), draw.randrange(NUM_ENGINES), draw.random()
        if chance < 0.8:
            machine.step_and_publish(number, (1,) if chance < 0.1 else ())
        elif chance < 0.85:
            machine.restart(engine)
        elif chance < 0.95:
            machine.break_a_link(number, engine, draw.choice(FAULTS), draw.randrange(3), draw.choice([SMALL, LARGE]))
        else:
            machine.change_a_bit(number, engine, number)
    machine.teardown()
    first, *others = machine.num_bytes
    assert machine.kind.sync is not CHANGES or median(others) < 0.7 * first, "of gpt-oss, experts go whole"


def machine_of(name: str) -> Callable[[], AnyPublishes]:
    """The machine of a kind."""
    return type("AnyPublishesOfAKind", (AnyPublishes,), {"kind": KINDS[name]})
