"""trainer.recompute: the gradients of a part are those without it, and what is inside is not kept.

Also what a decoder's step holds while its first layer goes backward, where it holds most.
"""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, GPT_OSS, MOE
from cases.tiny_models import logits_of, make_decoder, packed, probe_loss, trainer_config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.conf.schema import Activations
from slipstream.trainer.engine_ops.engine_forward import MergedForward
from slipstream.trainer.model.forward import Forward
from slipstream.trainer.recompute import Recomputed, recomputation


class Part(nn.Module):
    """Two inputs; a number, an index and nothing among the outputs; a frozen weight and two trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)
        self.inner: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor, y: Tensor, factors: tuple[Tensor, float]) -> tuple[Any, ...]:
        wide = self.first(x) * factors[0]
        self.inner.append(weakref.ref(wide))
        out = self.second(wide.sin())
        return out, out.argmax(-1), None, (out * y).sum(-1) * factors[1]


def gradients(part: Part, run: Any, *, does_x: bool, used: tuple[int, ...]) -> list[Tensor | None]:
    torch.manual_seed(1)
    x, y = torch.randn(3, 5, requires_grad=does_x), torch.randn(3, 5, requires_grad=True)
    part.zero_grad()
    outs = run(x, y, (torch.randn(7), 3.0))
    assert not outs[1].requires_grad
    assert outs[2] is None
    torch.stack([(outs[index] ** 2).sum() for index in used]).sum().backward()
    return [x.grad, y.grad, *(parameter.grad for parameter in part.parameters())]


@pytest.mark.parametrize("does_x", [True, False])
@pytest.mark.parametrize("used", [(0, 3), (0,), (3,)])
def test_gradients_are_those_of_the_part_itself(does_x: bool, used: tuple[int, ...]) -> None:
    part = Part()
    wanted = gradients(part, part, does_x=does_x, used=used)
    mine = gradients(part, partial(Recomputed([part]), part), does_x=does_x, used=used)
    assert len(part.inner) == 3  # twice, and once without
    for one, other in zip(mine, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert wanted[2] is not None


def test_what_is_inside_lives_no_longer_than_the_call() -> None:
    part = Part()
    out, *_ = Recomputed([part])(part, torch.randn(3, 5), torch.randn(3, 5), (torch.randn(7), 3.0))
    assert out.requires_grad
    assert part.inner[0]() is None
    kept, *_ = part(torch.randn(3, 5), torch.randn(3, 5), (torch.randn(7), 3.0))
    assert kept.requires_grad
    assert part.inner[1]() is not None


def test_an_input_without_a_gradient_ends_before_the_backward_inside() -> None:
    """The first layer's is the embeddings, in the moment when a step holds most."""
    seen, x, y = [], torch.randn(3, 5), torch.randn(3, 5, requires_grad=True)
    ref = StorageWeakRef(x.untyped_storage())

    def part(x: Tensor, y: Tensor) -> Tensor:
        out = x.sign() * y
        if torch.is_grad_enabled():  # not the first time
            out.register_hook(lambda grad: seen.append(ref.expired()))
        return out.sin()

    out = Recomputed([])(part, x, y)
    del x
    (first,) = torch.autograd.grad(out.sum(), y, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), y)
    assert torch.equal(first, second)
    assert seen == [False, True]  # a graph that is kept keeps it


def test_an_output_that_is_had_again_is_computed_for_both() -> None:
    part = Part()
    x, y = torch.randn(3, 5), torch.randn(3, 5, requires_grad=True)
    out, _, _, other = Recomputed([part])(part, x, y, (torch.randn(7), 3.0))
    again = recomputation(out)
    assert again is not None
    assert torch.equal(again(), out)
    assert not again().requires_grad
    (out.sum() + other.sum()).backward()
    assert len(part.inner) == 2
    assert recomputation(x) is None
    assert recomputation(part.first(x)) is None


@pytest.mark.parametrize("by", [Forward(), MergedForward()], ids=["own", "merged"])
def test_a_forgotten_decoder_is_freed_at_once(by: Forward) -> None:
    """A device holds one model, and the heap may be frozen, of which the collector sees nothing."""
    decoder = make_decoder(MOE)
    batch = packed()
    probe_loss(decoder.apply_head(torch.nn.functional.linear, decoder(*batch, by=by)), batch[0]).backward()
    weights = [weakref.ref(parameter) for parameter in decoder.parameters()]
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


class Alive(TorchDispatchMode):
    """Storages of what operators returned, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outs):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known[0].expired():  # a later storage may have the address of one that ended
                    self._storages[storage._cdata] = StorageWeakRef(storage), tuple(x.shape), storage.nbytes()
        return outs

    def held(self, decoder: nn.Module) -> list[tuple[int, tuple[int, ...]]]:
        """(bytes, shape) of each, parameters and their gradients left out; largest first."""
        parameters = list(decoder.parameters())
        given = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        others = {x.untyped_storage()._cdata for x in given}
        alive = [one for one in self._storages.values() if not one[0].expired() and one[0].cdata not in others]
        return sorted(((size, shape) for _, shape, size in alive), reverse=True)


def held_in_the_first_layer(hf_config: dict[str, Any], num_layers: int, *, checkpointing: bool) -> Any:
    """What is alive when the first layer's attention is about to go backward."""
    decoder = make_decoder(
        {**hf_config, "num_hidden_layers": num_layers},
        trainer_config(activations=Activations("recompute" if checkpointing else "keep")),
    )
    batch, alive, found = packed(), Alive(), []
    o_proj = decoder.model.layers[0].get_submodule("self_attn.o_proj")
    o_proj.get_parameter("lora_A").register_hook(lambda grad: found.append(alive.held(decoder)))
    with alive:
        probe_loss(logits_of(decoder, batch), batch[0]).backward()
    (held,) = found
    return held


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "all kept"])
@pytest.mark.parametrize("hf_config", [MOE, DEEPSEEK, GPT_OSS], ids=["moe", "deepseek", "gpt_oss"])
def test_later_layers_leave_nothing_but_gradients(hf_config: dict[str, Any], checkpointing: bool) -> None:
    """The graph lives until its last node is done, and with it what hangs on its nodes beside saved tensors."""
    few, many = (held_in_the_first_layer(hf_config, n, checkpointing=checkpointing) for n in (3, 6))
    assert few
    assert few == many


def test_experts_keep_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have them again from the part before them, which is computed again once, for both."""
    routings, refs, route = [], [], Forward.route
    monkeypatch.setattr(Forward, "route", lambda self, *given: routings.append(self) or route(self, *given))
    decoder, batch = make_decoder(MOE, trainer_config(activations=Activations.recompute)), packed()
    for layer in decoder.model.layers:
        layer.get_submodule("mlp.experts").register_forward_pre_hook(
            lambda _, args: refs.append(StorageWeakRef(args[0].untyped_storage()))
        )
    logits = logits_of(decoder, batch)
    assert [ref.expired() for ref in refs] == [True, True]
    probe_loss(logits, batch[0]).backward()
    assert len(routings) == 2 * len(refs)
