"""Locks: fakes and the product's own classes answer to the same calls, those that the product's protocols declare."""

import inspect

import pytest
from fakes.loop import FakeEpisodes, FakePrompts, FakeRewards, FakeTeacher
from fakes.memory_transport import MemoryTransport
from fakes.model_engine import ModelEngine
from fakes.publish import DictSource, PlainEngine
from fakes.trainer import FakeTrainer
from fakes.workers import FakeWorker
from unit.orchestrator.push.test_push_order import NotingEngine, NotingRank
from unit.rollout.adapters.test_adapter_replica import SeededEngine

from slipstream.fleet.replicas import RolloutHandle
from slipstream.orchestrator.cluster.ray_handles import RayRolloutWorker, RayTrainerGroup
from slipstream.orchestrator.data.curriculum import Middling
from slipstream.orchestrator.data.streams import Mixed, Shuffled, Stream, Streamed
from slipstream.orchestrator.loop.ports import LoopTrainer
from slipstream.orchestrator.push.sender_process import RankProcess
from slipstream.rollout.adapters.adapter_replica import AdapterReplica
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.base_replica import BaseReplica
from slipstream.rollout.engine.engine import Engine
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.served.client import ServedEngine
from slipstream.rollout.teacher import Teacher
from slipstream.rollout.worker import RolloutWorker
from slipstream.rollout.worker_verbs import WorkerVerbs
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint, ReplicaHandler
from slipstream.weight_sync.replica.messages import ReplicaVerbs
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.base import Transport
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

PAIRS = [
    (LoopTrainer, FakeTrainer),
    (LoopTrainer, RayTrainerGroup),
    (RolloutHandle, FakeWorker),
    (RolloutHandle, RayRolloutWorker),
    (WorkerVerbs, RolloutWorker),
    (Engine, VllmEngine),
    (Stream, FakePrompts),
    (Stream, Shuffled),
    (Stream, Streamed),
    (Stream, Mixed),
    (Stream, Middling),
    (Transport, MemoryTransport),
    (Transport, MooncakeTransport),
    (WeightSource, DictSource),
    (WeightSource, TrainerWeightSource),
    (WeightSource, AdapterSource),
    (ReplicaVerbs, ReplicaEndpoint),
    (ReplicaHandler, PlainEngine),
    (ReplicaHandler, BaseReplica),
    (ReplicaHandler, AdapterReplica),
]


@pytest.mark.parametrize(("protocol", "cls"), PAIRS, ids=lambda cls: cls.__name__)
def test_every_call_of_a_protocol_has_the_same_parameters_everywhere(protocol: type, cls: type) -> None:
    calls = {
        name: call
        for base in protocol.__mro__
        for name, call in vars(base).items()
        if inspect.isfunction(call) and (name == "__next__" or not name.startswith("_"))
    }
    assert calls
    for name, call in calls.items():
        own = getattr(cls, name)
        assert own is not call or inspect.isabstract(protocol), (
            f"{name} is declared, and not done"
        )  # an ABC has defaults
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(call), name
        declared, has = inspect.signature(call).parameters, inspect.signature(own).parameters
        taken = [p for p in has.values() if p.kind is not p.KEYWORD_ONLY or p.name in declared]  # others have defaults
        assert [(p.name, p.default) for p in taken] == [(p.name, p.default) for p in declared.values()], name


STAND_INS = [
    (RewardRunner, FakeRewards),
    (Teacher, FakeTeacher),
    (EpisodeRunner, FakeEpisodes),
    (VllmEngine, ModelEngine),
    (VllmEngine, SeededEngine),
    (ServedEngine, NotingEngine),
    (RankProcess, NotingRank),
]


@pytest.mark.parametrize(("cls", "stand_in"), STAND_INS, ids=lambda cls: cls.__name__)
def test_a_stand_in_has_no_call_and_no_parameter_that_its_class_lacks(cls: type, stand_in: type) -> None:
    calls = {name: call for name, call in vars(stand_in).items() if inspect.isfunction(call) and name[0] != "_"}
    assert calls
    for name, call in calls.items():
        own = getattr(cls, name)
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(call), name
        has, declared = inspect.signature(call).parameters.values(), inspect.signature(own).parameters
        named = {p.name for p in has if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "_"}
        assert named <= set(declared), name
