"""The recorder on hand-written loaders: the same loader, run on real tensors, is the oracle for what was recorded."""

from collections.abc import Callable, Iterable

import pytest
import torch
from cases.packed_reads import part_of
from torch import Tensor

from slipstream.weight_sync.errors import RecordError
from slipstream.weight_sync.layout import DestLayout, Fill, Load, PostLoad, Region, TensorMeta
from slipstream.weight_sync.record.recorder import record_layout

Weights = Iterable[tuple[str, Tensor]]
UNTOUCHED = -7.0


def metas(tensors: dict[str, Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]


def numbered(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Checkpoint tensors with a different number in every element."""
    tensors, first = {}, 1
    for name, shape in shapes.items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count
    return tensors


def replay(layout: DestLayout, tensors: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Do what the layout says, in fresh memory."""
    memory = {param.name: torch.full_like(params[param.name], UNTOUCHED, device="cpu") for param in layout.params}
    for load in layout.loads:
        piece = part_of(tensors[load.tensor], load.region).permute(load.axes)
        memory[load.param].view(-1).as_strided(piece.shape, load.stride, load.offset).copy_(piece)
    for fill in layout.fills:
        memory[fill.param].view(-1)[fill.offset : fill.offset + fill.num_elements] = fill.value
    return memory


def check(
    loader: Callable[[dict[str, Tensor], Weights], None], tensors: dict[str, Tensor], **shapes: tuple[int, ...]
) -> DestLayout:
    """Record the loader, replay the record, and compare with the loader on real tensors."""
    params = {name: torch.full(shape, UNTOUCHED) for name, shape in shapes.items()}
    layout = record_layout(lambda weights: loader(params, weights), params, metas(tensors), 3)
    assert all(bool((param == UNTOUCHED).all()) for param in params.values()), "recording must leave parameters alone"
    assert layout.rank == 3
    got = replay(layout, tensors, params)
    loader(params, tensors.items())
    for name, wanted in params.items():
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=0)
    return layout


# --- what engines do ---


@pytest.mark.parametrize("tp_rank", [0, 1, 3])
def test_fused_qkv_with_replicated_kv_heads(tp_rank):
    """Four ranks, two KV heads: ranks 0 and 1 share the first."""

    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        where = {"q": (0, tp_rank, 4), "k": (4, tp_rank // 2, 2), "v": (6, tp_rank // 2, 2)}
        for name, weight in weights:
            start, shard, size = where[name]
            params["qkv"].data.narrow(0, start, size).copy_(weight.narrow(0, shard * size, size))

    layout = check(loader, numbered(q=(16, 3), k=(4, 3), v=(4, 3)), qkv=(8, 3))
    assert layout.loads[1] == Load("k", Region((2 * (tp_rank // 2), 0), (2, 3)), (0, 1), "qkv", 12, (3, 1))


def test_gate_above_up_and_a_column_split_down():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for name, weight in weights:
            if name == "down":
                params["down"].data.copy_(weight.chunk(2, dim=1)[1])
            else:
                half = params["gate_up"].data.narrow(0, 0 if name == "gate" else 2, 2)
                half.copy_(weight.narrow(0, 2, 2).to("cpu"))

    layout = check(loader, numbered(gate=(4, 5), up=(4, 5), down=(5, 4)), gate_up=(4, 5), down=(5, 2))
    assert layout.loads[2] == Load("down", Region((0, 2), (5, 2)), (0, 1), "down", 0, (2, 1))


def test_experts_stacked_with_narrowed_halves_and_indexed_destinations():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for name, weight in weights:
            expert, kind = int(name[1]), name[3:]
            if expert % 2:  # another rank's
                continue
            if kind == "down":
                params["w2"].data[expert // 2].copy_(weight[:, 2:4])
            else:
                params["w13"].data[expert // 2].narrow(0, 0 if kind == "gate" else 2, 2).copy_(weight[2:4].contiguous())

    shapes = {f"e{e}_{kind}": (6, 4) if kind == "down" else (4, 6) for e in range(4) for kind in ("gate", "up", "down")}
    layout = check(loader, numbered(**shapes), w13=(2, 4, 6), w2=(2, 6, 2))
    assert {load.tensor[:2] for load in layout.loads} == {"e0", "e2"}


def test_fused_checkpoint_experts_transposed_and_unbound():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for _, weight in weights:
            for expert, piece in enumerate(weight.transpose(-1, -2).unbind(0)):
                params["w"].data[expert].copy_(piece)

    def cloned(params: dict[str, Tensor], weights: Weights) -> None:
        for _, weight in weights:
            params["w"].copy_(weight.detach().transpose(1, 2).contiguous().clone())

    layout = check(loader, numbered(fused=(3, 4, 5)), w=(3, 5, 4))
    assert check(cloned, numbered(fused=(3, 4, 5)), w=(3, 5, 4)).loads[0].axes == (0, 2, 1)
    assert layout.loads[1] == Load("fused", Region((1, 0, 0), (1, 4, 5)), (0, 2, 1), "w", 20, (20, 4, 1))


def test_vocabulary_padding_is_a_fill():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for _, weight in weights:
            part = weight.narrow(0, 4, 2)
            params["embed"][: part.shape[0]].data.copy_(part)
            params["embed"][part.shape[0] :].data.fill_(0)

    assert check(loader, numbered(embed=(6, 3)), embed=(4, 3)).fills == (Fill("embed", 6, 6, 0.0),)


def test_a_block_zeroed_before_a_narrower_copy_leaves_fills_around_it():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for _, weight in weights:
            params["p"].data.fill_(1.5)
            params["p"].data[:, 4:].zero_()
            params["p"].data[:2, :3].copy_(weight)

    layout = check(loader, numbered(t=(2, 3)), p=(3, 5))
    assert layout.fills == (
        Fill("p", 3, 1, 1.5),
        Fill("p", 4, 1, 0.0),
        Fill("p", 8, 1, 1.5),
        Fill("p", 9, 1, 0.0),
        Fill("p", 10, 4, 1.5),
        Fill("p", 14, 1, 0.0),
    )


def test_a_constant_set_by_assignment_is_a_fill():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for _, weight in weights:
            params["p"].data[0] = weight
            params["p"].data[1] = 2.0
            params["p"].data[2] = torch.tensor(3.0)

    assert [fill.value for fill in check(loader, numbered(t=(4,)), p=(3, 4)).fills] == [2.0, 3.0]


def test_a_tensor_that_all_ranks_but_one_set_to_zero_is_a_fill():
    """A bias that is added once, whatever the number of ranks whose sums are added up (gpt-oss)."""

    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for name, weight in weights:
            if name == "bias":
                weight.zero_()
            params[name].copy_(weight.view(weight.shape))

    layout = check(loader, numbered(bias=(2, 3), w=(4,)), bias=(2, 3), w=(4,))
    assert [(fill.param, fill.num_elements, fill.value) for fill in layout.fills] == [("bias", 6, 0.0)]
    assert [load.tensor for load in layout.loads] == ["w"]


def test_views_that_split_and_join_dims():
    def loader(params: dict[str, Tensor], weights: Weights) -> None:
        for name, weight in weights:
            if name == "heads":  # rows seen as (2 heads, 3), heads swapped with columns by the parameter
                params["heads"].data.copy_(weight.view(2, 3, 4).permute(0, 2, 1))
            elif name == "flat":
                params["flat"].data.copy_(weight.reshape(-1))
            elif name == "some":  # the first row of each head: two rectangles
                params["some"].data.copy_(weight.view(2, 3, 4)[:, 0])
            elif name == "scale":
                params["scale"].data.copy_(weight.view(1))
            else:
                params["thin"].data.copy_(weight.view(1, 1, 6).expand(1, 1, 6))

    layout = check(
        loader,
        numbered(heads=(6, 4), flat=(3, 4), some=(6, 4), thin=(6, 1), scale=()),
        heads=(2, 4, 3),
        flat=(12,),
        some=(2, 4),
        thin=(1, 1, 6),
        scale=(1,),
    )
    assert Load("scale", Region((), ()), (), "scale", 0, ()) in layout.loads
    assert len([load for load in layout.loads if load.tensor == "some"]) == 2


def test_parameters_in_one_storage_and_parameters_without_memory():
    flat = torch.zeros(24)
    params = {"a": flat[:8].view(2, 4), "b": flat[8:].view(4, 4), "c": torch.empty(2, 4, device="meta")}

    def loader(weights: Weights) -> None:
        for name, weight in weights:
            params[name].copy_(weight)

    layout = record_layout(loader, params, metas(numbered(a=(2, 4), b=(4, 4), c=(2, 4))), 0)
    assert [(load.param, load.offset) for load in layout.loads] == [("a", 0), ("b", 0), ("c", 0)]
    assert not flat.any()


def test_tied_parameters_are_one():
    embed = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    layout = record_layout(
        lambda weights: [embed.data.copy_(w) for name, w in weights if name == "embed"],
        {"embed": embed, "head": embed},
        metas(numbered(embed=(4, 2), head=(4, 2), inv_freq=(3,))),
        0,
    )
    assert [param.name for param in layout.params] == ["embed"]


def test_casts_the_parameter_decides():
    tensors = [TensorMeta("a", (4,), "bfloat16"), TensorMeta("b", (4,), "float32")]
    params = {"a": torch.zeros(4, dtype=torch.float16), "b": torch.zeros(4, dtype=torch.bfloat16)}

    def loader(weights: Weights) -> None:
        for name, weight in weights:
            # exact on the way up; b is rounded to the parameter's own type, as a copy would
            params[name].copy_(weight.float() if name == "a" else weight.to(torch.bfloat16))

    layout = record_layout(loader, params, tensors, 0)
    assert [(p.name, p.dtype) for p in layout.params] == [("a", "float16"), ("b", "bfloat16")]


def test_a_derived_parameter_need_not_be_written_and_formats_are_kept():
    params = {"p": torch.zeros(2), "absorbed": torch.zeros(3)}
    formats = {"absorbed": PostLoad.derived, "p": PostLoad.repack}
    layout = record_layout(
        lambda ws: [params["p"].copy_(w) for _, w in ws],
        params,
        [TensorMeta("p", (2,), "float32")],
        0,
        post_load=formats,
    )
    assert [p.post_load for p in layout.params] == [PostLoad.repack, PostLoad.derived]


def test_a_parameter_that_is_left_out_keeps_its_values_and_is_in_no_layout():
    tensors = numbered(w=(4, 3))
    slots = torch.full((3, 4, 3), UNTOUCHED)
    params = {f"{slot}": slots[slot] for slot in range(3)}

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            for slot in slots:
                slot[...] = 0
                slot[:2].copy_(tensor[:2])
                slot[2:].copy_(torch.stack(list(tensor[2:])))

    whole = record_layout(load, params, metas(tensors), 0)
    part = record_layout(load, params, metas(tensors), 0, left_out={"1"})
    assert bool((slots == UNTOUCHED).all())
    assert part == DestLayout(
        0,
        tuple(param for param in whole.params if param.name != "1"),
        tuple(one for one in whole.loads if one.param != "1"),
        tuple(one for one in whole.fills if one.param != "1"),
    )
    with pytest.raises(RecordError, match=r"1: aten\.mul_"):
        record_layout(lambda _: params["1"].mul_(2), params, metas(tensors), 0, left_out={"1"})


def test_an_active_inference_mode_does_not_hide_ops():
    params = {"p": torch.zeros(4)}
    with torch.inference_mode():
        layout = record_layout(
            lambda ws: [params["p"].copy_(w.reshape(2, 2).flatten()) for _, w in ws],
            params,
            [TensorMeta("p", (4,), "float32")],
            0,
        )
    assert len(layout.loads) == 1


# --- loaders that gather experts with torch.stack before they copy ---

E, R, K = 4, 3, 5


EXPERTS = [TensorMeta(f"experts.{e}.a", (R, K), "float32") for e in range(E)]


@pytest.mark.parametrize(
    "part",
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 3), slice(None), slice(None)),  # experts of one rank
        (slice(None), slice(1, 3), slice(None)),  # rows of one rank
        (slice(2, 4), slice(None), slice(2, 5)),  # columns of one rank
    ],
)
def test_a_stack_of_experts_is_replayed_as_one_load_an_expert(part: tuple[slice, ...]):
    values = {meta.name: torch.randn(R, K) for meta in EXPERTS}
    wanted = torch.stack(list(values.values()))[part]
    buffer = torch.zeros(2, *wanted.shape)  # the second of two slots, zeroed first, as vLLM's set_lora does

    def load(tensors):
        stacked = torch.stack([tensor for _, tensor in tensors], dim=0)
        buffer[1] = 0
        buffer[1, :, : wanted.shape[1]].copy_(stacked[part], non_blocking=True)

    layout = record_layout(load, {"slot": buffer[1]}, EXPERTS, 0)
    assert torch.equal(replay(layout, values, {"slot": buffer[1]})["slot"], wanted)
    assert not buffer.any(), "recording must not write"
    assert all(load.region.intersect(Region((0, 0), (R, K))) == load.region for load in layout.loads)


@pytest.mark.parametrize(
    ("gather", "what"),
    [
        (lambda parts: torch.cat(parts), "joins it with other tensors"),
        (lambda parts: torch.stack(parts, dim=1), "joins it with other tensors"),
        (lambda parts: torch.stack([*parts, torch.zeros(R, K, device="meta")]), "joins it with other tensors"),
        (lambda parts: torch.stack(parts).mul_(2), "changes the values of a stack"),
        (lambda parts: torch.stack(parts) * 2, "no part of a checkpoint tensor"),
        (lambda parts: torch.stack(parts).transpose(0, 1), "only parts of its entries"),
    ],
)
def test_a_gathering_that_is_not_a_stack_of_whole_tensors_is_refused(gather, what: str):
    buffer = torch.zeros(E * R, K)

    def load(tensors):
        value = gather([tensor for _, tensor in tensors])
        buffer.view(value.shape)[...].copy_(value) if value.numel() == buffer.numel() else buffer.copy_(value[0])

    with pytest.raises(RecordError, match=what):
        record_layout(load, {"slot": buffer}, EXPERTS, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_number_assigned_to_a_part_is_a_fill_on_any_device(device: str):
    """Off the CPU, `buffer[0] = 2.5` is a copy from a tensor that torch makes of the number."""
    buffer = torch.zeros(2, 3, device=device)

    def load(tensors):
        buffer[0] = 2.5
        ((_, tensor),) = tensors
        buffer[1].copy_(tensor)

    layout = record_layout(load, {"p": buffer}, [TensorMeta("t", (3,), "float32")], 0)
    assert [(fill.offset, fill.num_elements, fill.value) for fill in layout.fills] == [(0, 3, 2.5)]


# --- what is refused ---


@pytest.mark.parametrize(
    ("operation", "pattern"),
    [
        (lambda p, w: p.copy_(w * 2), "t: aten.mul"),
        (lambda p, w: p.copy_(w + 1), "t: aten.add"),
        (lambda p, w: p.add_(w), "p: aten.add_"),
        (lambda p, w: p.mul_(2), "p: aten.mul_"),
        (lambda p, w: p.copy_(torch.cat([w[:2], w[2:]])), "t: aten.cat"),
        (lambda p, w: p.copy_(w[torch.tensor([1, 0, 3, 2])]), "t: aten.index"),
        (lambda p, w: p.copy_(w.to(torch.bfloat16)), "loses values"),
        (lambda p, w: p.copy_(w.to(torch.bfloat16).float()), "had lost values"),
        (lambda p, w: p.copy_(w.view(torch.int32)), "t: aten.view.dtype reinterprets"),
        (lambda p, w: p.copy_(torch.zeros(4, 4)), "no part of a checkpoint tensor"),
        (lambda p, w: torch.zeros(4, 4).copy_(w), "that is no parameter"),
        (lambda p, w: (w[:2].zero_(), p.copy_(w)), "t: a part of it is set to 0"),
        (lambda p, w: w.fill_(1.0), "writes argument self"),
        (lambda p, w: w.copy_(p), "writes into it"),
        (lambda p, w: p.copy_(w[0]), "is no rectangle: it repeats"),
        (lambda p, w: p.view(-1)[:8].copy_(w.view(-1)[2:10]), "is no rectangle: it runs across the rows"),
        (lambda p, w: p.view(-1)[:5].copy_(w.view(-1)[::3][:5]), "is no rectangle: it steps across|runs across"),
        (lambda p, w: w[0, 0].item(), "t: aten._local_scalar_dense"),
        (lambda p, w: bool(torch.equal(w, w)), "t: aten.equal"),
        (lambda p, w: p.copy_(w.numpy()), "the loader failed on t"),
        (lambda p, w: p.view(torch.int32).copy_(w), "is written as torch.int32"),
        (lambda p, w: (p.copy_(w), p[1:3].copy_(w[1:3])), "element 4 is loaded more than once, from t"),
        (lambda p, w: (p.copy_(w), p[2].zero_()), "fills element 8 with a constant after loading it"),
        (lambda p, w: p[:, :3].copy_(w[:, :3]), "leaves 4 of 16 elements as they were, the first at 3"),
        (lambda p, w: setattr(p, "data", torch.ones(4, 4)), "replaced its memory"),
        (lambda p, w: (p.copy_(w), setattr(p, "data", p.data.t())), "replaced its memory"),
        (lambda p, w: None, r"never wrote 1 parameter\(s\): p"),
        (lambda p, w: 1 / 0, "the loader failed on t: ZeroDivisionError.*; is it a tensor of the engine's own model"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_named(operation, pattern):
    param = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def loader(weights: Weights) -> None:
        for _, weight in weights:
            operation(param, weight)

    with pytest.raises(RecordError, match=pattern):
        record_layout(loader, {"p": param}, [TensorMeta("t", (4, 4), "float32")], 0)
    if "replaced" not in pattern:
        assert not param.any()


def test_a_refusal_that_the_loader_swallows_still_counts():
    param = torch.zeros(2)

    def loader(weights: Weights) -> None:
        for _, weight in weights:
            try:
                param.copy_(weight * 2)
            except Exception:  # noqa: BLE001 - any error of the loader counts
                param.copy_(weight)

    with pytest.raises(RecordError, match=r"aten\.mul"):
        record_layout(loader, {"p": param}, [TensorMeta("t", (2,), "float32")], 0)


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"p": torch.zeros(0)}, "p is empty"),
        ({"p": torch.zeros(4, 3).t()}, "must be contiguous"),
        ({"p": torch.zeros(2, dtype=torch.complex64)}, "known are"),
    ],
)
def test_parameters_that_no_write_can_reach_are_refused(params, pattern):
    with pytest.raises(RecordError, match=pattern):
        record_layout(lambda weights: None, params, [], 0)


def test_parameters_that_overlap_are_refused():
    flat = torch.zeros(6)
    with pytest.raises(RecordError, match="b and a overlap"):
        record_layout(lambda weights: None, {"a": flat[:4], "b": flat[2:]}, [], 0)


def test_every_unwritten_parameter_is_named_and_unknown_formats_are_refused():
    params = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(RecordError, match=r"never wrote 2 .*: b, c"):
        record_layout(lambda ws: [params["a"].copy_(w) for _, w in ws], params, [TensorMeta("a", (2,), "float32")], 0)
    with pytest.raises(RecordError, match="unknown parameters: d"):
        record_layout(lambda ws: None, params, [], 0, post_load={"d": PostLoad.derived})
