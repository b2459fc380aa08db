"""The weight-transfer backend on one engine rank, over vLLM's own base classes, with a small module as the model.

test_push_vllm.py has the whole: `vllm serve` and the command. Here are the refusals.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.checkpoints import TINY
from safetensors.torch import save_file

pytest.importorskip("vllm")

from slipstream.rollout.errors import EngineError
from slipstream.rollout.served.client import RankReport, Rendezvous
from slipstream.weight_sync.api import Sender, register_checkpoint, register_tensors, update
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_digest
from slipstream.weight_sync.record.recorder import record_layout

KEY = b"0123456789abcdef-backend"


class Tiny(torch.nn.Module):
    """Two checkpoint tensors, one below the other in one parameter, and a norm in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's models have it."""
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                self.fused.data.narrow(0, {"q": 0, "k": 4}[name], tensor.shape[0]).copy_(tensor)
        return {"fused", "norm"}


class Layered(torch.nn.Module):
    """Four layers of one weight. The loader turns one of them round, which its parameters do not show."""

    def __init__(self, turned: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2, bias=False, dtype=torch.bfloat16) for _ in range(4))
        self.turned = turned

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Rows in the checkpoint's order, but for that layer."""
        for name, tensor in weights:
            number = int(name.split(".")[1])
            layer: Any = self.layers[number]
            for row in range(2):
                layer.weight.data[row].copy_(tensor[1 - row if number == self.turned else row])


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(rows, 4, generator=generator).to(torch.bfloat16) for rows in (4, 2))
    return {"q": q, "k": k, "norm": torch.randn(4, generator=generator)}


def metas(tensors: dict[str, torch.Tensor]) -> tuple[TensorMeta, ...]:
    return register_tensors(tensors).layout().tensors


class Served:
    """The backend as vLLM makes it, and the sender's end of its reports."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from slipstream.rollout.served.vllm_plugin import register

        register()
        self.model: Any = Tiny() if model is None else model
        config = WeightTransferConfig(backend="slipstream")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
            described = VllmConfig(model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16"))
        self.backend: Any = WeightTransferEngineFactory.create_engine(
            config, described, torch.device("cpu"), self.model
        )
        self.rendezvous = Rendezvous(KEY, "127.0.0.1")
        self.report: RankReport | None = None

    def attach(self, tensors: dict[str, torch.Tensor], *layouts: str) -> RankReport:
        info = {
            "tensors": [[meta.name, list(meta.shape), meta.dtype] for meta in metas(tensors)],
            "key": KEY.hex(),
            "report_to": self.rendezvous.address,
            "transport": "tcp",
            "layouts": list(layouts),
        }
        try:
            self.backend.init_transfer_engine(self.backend.parse_init_info(info))
        finally:
            self.report = self.rendezvous.receive(10)
        assert self.report is not None
        return self.report

    def wrong(self, seed: int) -> list[str]:
        wanted = weights(seed)
        expected = {"fused": torch.cat([wanted["q"], wanted["k"]]), "norm": wanted["norm"].to(torch.bfloat16)}
        return [name for name, param in self.model.named_parameters() if not torch.equal(param, expected[name])]


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.backend.shutdown()
    served.rendezvous.close()


def test_weights_arrive_between_start_and_finish_and_at_no_other_time(served: Served, tmp_path: Any) -> None:
    save_file(weights(1), tmp_path / "model.safetensors")
    report = served.attach(weights(1))
    assert (report.rank, report.num_ranks, report.error) == (0, 1, "")
    sender = Sender(register_checkpoint(tmp_path).source, [report.endpoint], key=KEY, device="cpu")
    try:
        early = sender.update(0)
        assert early.num_committed == 0
        assert "no weight update is under way" in (early.replicas[0].error or "")
        assert not served.model.fused.any()
        served.backend.start_weight_update()
        with pytest.raises(EngineError, match="holds no committed version and must not serve"):
            served.backend.finish_weight_update()
        assert sender.update(0).num_committed == 1
        served.backend.finish_weight_update()
        assert served.wrong(1) == []
        late = sender.update(1)
        assert late.num_committed == 0
        assert served.wrong(1) == []
    finally:
        sender.close()


def test_an_update_in_which_nothing_arrived_cannot_be_finished_by_what_the_update_before_left(served: Served) -> None:
    """Neither by a finished one, nor by one that this rank had committed and that is given up."""
    endpoint = served.attach(weights(1)).endpoint
    sender = Sender(register_tensors(weights(1)), [endpoint], key=KEY, device="cpu")
    try:
        served.backend.start_weight_update()
        assert sender.update(0).num_committed == 1
        served.backend.finish_weight_update()
        with pytest.raises(EngineError, match="no weight update is under way"):
            served.backend.finish_weight_update()
        served.backend.start_weight_update()
        with pytest.raises(EngineError, match=r"received nothing in this update: it holds version 0 of an earlier one"):
            served.backend.finish_weight_update()
        assert sender.update(1).num_committed == 1
        served.backend.finish_weight_update()
        served.backend.start_weight_update()
        assert sender.update(2).num_committed == 1
        with pytest.raises(EngineError, match="given up: another rank broke"):
            served.backend.update_weights({"abort": "another rank broke"})
        with pytest.raises(EngineError, match="no weight update is under way"):
            served.backend.finish_weight_update()
        served.backend.start_weight_update()
        with pytest.raises(EngineError, match="received nothing in this update"):
            served.backend.finish_weight_update()
    finally:
        sender.close()


@pytest.mark.parametrize("turned", [-1, 3], ids=["all layers alike", "one layer not"])
def test_an_expected_layout_is_taken_where_it_is_proven_and_every_layer_is_recorded_where_it_is_not(
    turned: int,
) -> None:
    values = {f"layers.{n}.weight": torch.arange(8.0).reshape(2, 4).to(torch.bfloat16) + 8 * n for n in range(4)}
    model = Layered(turned)
    expected = record_layout(model.load_weights, dict(model.named_parameters()), metas(values), 0)
    served = Served(model)
    try:
        assert not served.attach(values).is_expected
        assert not served.attach(values, "0" * 64).is_expected
        report = served.attach(values, layouts_digest((expected,)))
        assert report.is_expected == (turned < 0)
        sender = Sender(register_tensors(values), None, key=KEY, device="cpu")
        try:
            sender.plan_for([(expected,)])
            sender.connect([report.endpoint])
            served.backend.start_weight_update()
            assert sender.update(0).num_committed == 1
        finally:
            sender.close()
    finally:
        served.backend.shutdown()
        served.rendezvous.close()
    for number, layer in enumerate(model.layers):
        value = values[f"layers.{number}.weight"]
        assert torch.equal(layer.weight, value.flip(0) if number == turned else value)


def test_a_failed_update_can_be_given_up_and_another_sender_can_follow(served: Served) -> None:
    first = served.attach(weights(1)).endpoint
    served.backend.start_weight_update()
    with pytest.raises(EngineError, match="given up: link broke"):
        served.backend.update_weights({"abort": "link broke"})
    second = served.attach(weights(2)).endpoint
    assert first != second
    calls: list[str] = []

    def hook(event: str) -> None:
        calls.append(event)
        {"start": served.backend.start_weight_update, "finish": served.backend.finish_weight_update}[event]()

    report = update(register_tensors(weights(2)), [second], key=KEY, device="cpu", request_hook=hook)
    assert report.num_committed == 1
    assert calls == ["start", "finish"]
    assert served.wrong(2) == []


def test_what_cannot_be_written_is_reported_to_the_sender_and_raised(served: Served) -> None:
    with pytest.raises(Exception, match="norm"):
        served.attach({name: tensor for name, tensor in weights(1).items() if name != "norm"})
    assert served.report is not None
    assert (served.report.error, served.report.endpoint) == ("RecordError", "")
    assert "norm" in served.report.text
    with pytest.raises(EngineError, match="before init_weight_transfer_engine"):
        served.backend.start_weight_update()


def test_weights_through_vllms_own_calls_are_refused_with_the_cure(served: Served) -> None:
    with pytest.raises(EngineError, match=r"update_weights carries no weights.*docs/push.md"):
        served.backend.update_weights({})
    with pytest.raises(EngineError, match="slipstream push"):
        served.backend.trainer_send_weights(iter([]), {})
    with pytest.raises(ValueError, match="Invalid init_info"):
        served.backend.parse_init_info({"colour": "red"})
