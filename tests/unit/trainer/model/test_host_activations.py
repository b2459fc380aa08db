"""trainer.activations=host and gate_up_kept: the same bits, the device holds two layers, and host memory returns to
its pool.

A CPU has no second memory: copies are real, and their order is the program's. tests/gpu/test_decoder_gpu.py has the
streams.
"""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from cases.rank_helpers import count, make_rank, make_samples, trained
from cases.tiny_configs import DEEPSEEK, GPT_OSS, MIXED, MOE
from cases.tiny_models import logits_of, make_decoder, packed, probe_loss, trainer_config
from torch import Tensor

from slipstream.conf.schema import Activations
from slipstream.trainer.model import host_activations
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.host_activations import HostLayer, HostPool, HostStack, MovedTensor
from slipstream.trainer.moe import experts as arithmetic

FAMILIES = {"moe": MOE, "dense_and_moe": MIXED, "latent_attention": DEEPSEEK, "sinks": GPT_OSS}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a tensor of these models spans several."""
    monkeypatch.setattr(host_activations, "CHUNK_BYTES", 10_000)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Memory must be free when its last user is gone, not when the collector of cycles runs next."""
    gc.disable()
    yield
    gc.enable()


def decoder_of(hf_config: dict[str, Any], num_layers: int = 4, *, on_host: bool = True, **options: Any) -> Decoder:
    config = trainer_config(activations=Activations.host if on_host else Activations.recompute, **options)
    decoder = make_decoder({**hf_config, "num_hidden_layers": num_layers}, config)
    if decoder.host is not None:
        decoder.host.room_bytes = lambda: 0
    return decoder


def num_chunks(pool: HostPool | None) -> int:
    assert pool is not None
    return len(pool.free)


def gradients(decoder: Decoder) -> list[Tensor]:
    found = [p.grad for p in decoder.parameters() if p.grad is not None]
    decoder.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_changes(family: str) -> None:
    results = []
    for on_host, gate_up_kept in ((False, 0.0), (True, 0.0), (False, 1.0), (True, 0.5)):
        decoder = decoder_of(FAMILIES[family], on_host=on_host, gate_up_kept=gate_up_kept)
        assert (decoder.host is not None) is on_host
        with torch.no_grad():
            logits_of(decoder, packed())
        assert not on_host or num_chunks(decoder.host) == 0, "without gradients nothing is moved"
        for _ in range(2):  # the second pass writes into chunks of the first
            logits = logits_of(decoder, packed())
            probe_loss(logits, packed()[0]).backward()
            results.append([logits.detach(), *gradients(decoder)])
        assert not on_host or num_chunks(decoder.host) > 3
    first, *others = results
    assert len(first) > 20
    for other in others:
        assert all(torch.equal(one, same) for one, same in zip(first, other, strict=True))


def test_two_passes_may_wait_for_their_backward_at_once() -> None:
    decoder = decoder_of(MOE)
    wanted = []
    for seed in (0, 1):
        probe_loss(logits_of(decoder, packed(seed=seed)), packed(seed=seed)[0]).backward()
        wanted.append(gradients(decoder))
    losses = [probe_loss(logits_of(decoder, packed(seed=seed)), packed(seed=seed)[0]) for seed in (0, 1)]
    for loss, expected in zip(losses, wanted, strict=True):
        loss.backward()
        assert all(torch.equal(one, same) for one, same in zip(gradients(decoder), expected, strict=True))
    assert not torch.equal(wanted[0][0], wanted[1][0])


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("share", "layers"), [(0.0, []), (0.5, [1, 3]), (0.75, [1, 2, 3]), (1.0, [0, 1, 2, 3])])
def test_layers_that_keep_gate_and_up_compute_them_once(
    share: float, layers: list[int], on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(MOE, on_host=on_host, gate_up_kept=share)
    calls: list[tuple[int, ...]] = []
    product = arithmetic.grouped_product

    def counted(rows: Tensor, weights: Tensor, *rest: Any, **named: Any) -> Tensor:
        calls.append(tuple(weights.shape))
        return product(rows, weights, *rest, **named)

    monkeypatch.setattr(arithmetic, "grouped_product", counted)
    loss = probe_loss(logits_of(decoder, packed()), packed()[0])
    in_forward, calls[:] = len(calls), []
    loss.backward()
    assert in_forward == 2 * 4
    assert len(calls) == 2 * 4 + (4 - len(layers))
    assert [index for index, layer in enumerate(decoder.model.layers) if layer.keeps_gate_up] == layers


@pytest.mark.parametrize("gate_up_kept", [0.0, 1.0])
@pytest.mark.parametrize("num_fitting", [0, 2])
def test_the_device_holds_two_layers_and_those_that_fit(
    num_fitting: int, gate_up_kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted after each call of a layer, in the forward and in the backward. The graph lives until its last node is
    done; were it to hold what was read back, all layers would be on the device at the end.
    """
    counts: dict[str, list[int]] = {"move": [], "get": []}
    tensors, stacks = (living(monkeypatch, kind) for kind in (MovedTensor, HostStack))

    def watched(name: str, call: Any) -> Any:
        def run(layer: HostLayer, given: Any) -> Any:
            result = call(layer, given)
            counts[name].append(sum(one.on_device is not None for one in tensors))
            return result

        return run

    for name in counts:
        monkeypatch.setattr(HostLayer, name, watched(name, getattr(HostLayer, name)))
    decoder = decoder_of(MOE, 6, gate_up_kept=gate_up_kept)
    num_tensors = 3 + int(gate_up_kept)
    num_moved = 6 - num_fitting
    assert decoder.host is not None
    room_bytes = num_fitting * layer_bytes(decoder)
    decoder.host.room_bytes = lambda: room_bytes
    for seen in counts.values():
        seen.clear()
    loss = probe_loss(logits_of(decoder, packed()), packed()[0])
    assert len(tensors) == num_tensors * num_moved
    loss.backward()
    assert len(counts["get"]) == (num_tensors + 1) * num_moved  # two parts of a layer read its input
    assert max(counts["move"]) == num_tensors * (2 + num_fitting)
    assert max(counts["get"]) == num_tensors * 2
    assert counts["get"][-1] == num_tensors
    assert not stacks


def layer_bytes(decoder: Decoder) -> int:
    """What one layer of six moves, all layers alike."""
    with pytest.MonkeyPatch.context() as patch:
        tensors = living(patch, MovedTensor)
        loss = probe_loss(logits_of(decoder, packed()), packed()[0])
        num_bytes = sum(sum(map(len, one.pieces)) for one in tensors)
        del loss
    assert num_bytes % 6 == 0
    return num_bytes // 6


def test_the_last_layers_stay_on_the_device_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(MOE, 6)
    assert decoder.host is not None
    probe_loss(logits_of(decoder, packed()), packed()[0]).backward()
    wanted = gradients(decoder)
    per_layer = layer_bytes(decoder)
    tensors = living(monkeypatch, MovedTensor)
    for room_bytes, num_moved in ((2 * per_layer, 4), (3 * per_layer - 1, 4), (100 * per_layer, 1), (0, 6)):
        decoder.host.room_bytes = lambda room_bytes=room_bytes: room_bytes
        loss = probe_loss(logits_of(decoder, packed()), packed()[0])
        assert len(tensors) == 3 * num_moved
        loss.backward()
        assert all(torch.equal(one, same) for one, same in zip(gradients(decoder), wanted, strict=True))


def test_layers_stay_on_the_device_while_gradients_have_no_memory_of_their_own() -> None:
    """The room is what gradients will take: of all parameters in the first microbatch, of none in those after it."""
    rank = make_rank(activations=Activations.host)
    rooms: list[int] = []
    pool = rank.decoder.host
    assert pool is not None
    hook = rank.decoder.register_forward_pre_hook(lambda *_: rooms.append(pool.room_bytes()))
    for version in range(2):
        samples = make_samples(2, version)
        rank.forward_backward([samples[:1], samples[1:]], count(samples, version))
        rank.optimizer_step()
    hook.remove()
    num_bytes = sum(param.nbytes for _, param in trained(rank))
    assert rooms == [num_bytes, 0] * 2


def living(monkeypatch: pytest.MonkeyPatch, kind: type) -> WeakSet[Any]:
    """The objects of a class that are made from now on, as long as they live."""
    alive: WeakSet[Any] = WeakSet()
    begin = kind.__init__

    def remembered(one: Any, *given: Any) -> None:
        begin(one, *given)
        alive.add(one)

    monkeypatch.setattr(kind, "__init__", remembered)
    return alive


def test_a_stack_is_cut_into_pieces_and_returns_its_chunks() -> None:
    pool = HostPool(torch.device("cpu"), lambda: 0)
    stack = HostStack(pool)
    sizes = [6000, 6000, 25_000, 10]
    pieces = [stack.take(size) for size in sizes]
    assert [sum(map(len, found)) for found in pieces] == sizes
    assert [len(found) for found in pieces] == [1, 2, 3, 1]
    for number, found in enumerate(pieces):
        for piece in found:
            piece.fill_(number)
    for number, found in enumerate(pieces):
        assert all(bool((piece == number).all()) for piece in found)
    assert num_chunks(pool) == 0
    del stack
    assert num_chunks(pool) == 4
    other = HostStack(pool)
    other.take(15_000)
    assert num_chunks(pool) == 2
    del other
    assert num_chunks(pool) == 4, "beside those that nobody had taken"


def test_what_cannot_be_moved_stays() -> None:
    layer = HostLayer(HostStack(HostPool(torch.device("cpu"), lambda: 0)), None)
    wide = torch.randn(4, 6)
    assert layer.move(wide[:, :3]) is None
    assert layer.move(wide[:0]) is None
    moved = layer.move(wide)
    assert moved is not None
    assert layer.move(wide.view(2, 12)) is moved
