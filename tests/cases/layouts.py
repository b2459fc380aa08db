"""Random trainer and engine layouts."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from slipstream.weight_sync.layout import (
    DestLayout,
    Fill,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)

# --- engine ranks: what a TP engine's loader does ---


class EngineRank:
    """Collects parameters, loads and fills as an engine's loader would make them on one TP rank."""

    def __init__(self, rank: int, tp_size: int) -> None:
        self.rank, self.tp_size = rank, tp_size
        self.params: list[Param] = []
        self.loads: list[Load] = []
        self.fills: list[Fill] = []

    def layout(self) -> DestLayout:
        return DestLayout(self.rank, tuple(self.params), tuple(self.loads), tuple(self.fills))

    def share(self, size: int, parts: int | None = None, part: int | None = None) -> tuple[int, int]:
        parts = self.tp_size if parts is None else parts
        part = self.rank if part is None else part
        assert size % parts == 0
        return part * (size // parts), size // parts

    def part(
        self, meta: TensorMeta, start: tuple[int, int], shape: tuple[int, int], param: str, offset: int = 0
    ) -> None:
        """A rectangle of a matrix, whose rows lie one after the other in the parameter."""
        self.loads.append(Load(meta.name, Region(start, shape), (0, 1), param, offset, (shape[1], 1)))

    def copied(self, meta: TensorMeta, dtype: str, post_load: PostLoad = PostLoad.identity) -> None:
        """A whole tensor, on every rank."""
        name, dims = f"engine.{meta.name}", range(len(meta.shape))
        self.params.append(Param(name, meta.shape, dtype, post_load))
        self.loads.append(Load(meta.name, Region((0,) * len(dims), meta.shape), tuple(dims), name, 0, rows(meta.shape)))

    def stacked_rows(self, name: str, parts: Sequence[tuple[TensorMeta, int]], dtype: str) -> None:
        """Row shards of several tensors below each other: fused qkv, gate_up. Each part has its own number of distinct
        shards (KV heads are fewer than ranks, so ranks share them)."""
        columns = parts[0][0].shape[1]
        at = 0
        for meta, shards in parts:
            first, count = self.share(meta.shape[0], shards, self.rank * shards // self.tp_size)
            self.part(meta, (first, 0), (count, columns), name, at * columns)
            at += count
        self.params.append(Param(name, (at, columns), dtype))

    def column_split(self, meta: TensorMeta, dtype: str) -> None:
        first, count = self.share(meta.shape[1])
        name = f"engine.{meta.name}"
        self.params.append(Param(name, (meta.shape[0], count), dtype))
        self.part(meta, (0, first), (meta.shape[0], count), name)

    def transposed(self, meta: TensorMeta, dtype: str) -> None:
        name = f"engine.{meta.name}"
        self.params.append(Param(name, (meta.shape[1], meta.shape[0]), dtype))
        self.loads.append(Load(meta.name, Region((0, 0), meta.shape), (1, 0), name, 0, (meta.shape[0], 1)))

    def padded_vocab(self, meta: TensorMeta, padding: int, dtype: str) -> None:
        first, count = self.share(meta.shape[0])
        name = f"engine.{meta.name}"
        columns = meta.shape[1]
        self.params.append(Param(name, (count + padding, columns), dtype))
        self.part(meta, (first, 0), (count, columns), name)
        if padding:
            self.fills.append(Fill(name, count * columns, padding * columns))

    def interleaved_columns(self, name: str, left: TensorMeta, right: TensorMeta, dtype: str) -> None:
        """[left | right] side by side: a strided destination, both parts cut into one run a row."""
        columns = left.shape[1] + right.shape[1]
        self.params.append(Param(name, (left.shape[0], columns), dtype))
        for meta, at in ((left, 0), (right, left.shape[1])):
            self.loads.append(Load(meta.name, Region((0, 0), meta.shape), (0, 1), name, at, (columns, 1)))

    def experts(
        self, layer: str, gates: list[TensorMeta], ups: list[TensorMeta], downs: list[TensorMeta], dtype: str
    ) -> None:
        """w13 (gate above up, TP-split by rows) and w2 (TP-split by columns), every expert local."""
        inter, hidden = gates[0].shape
        first, count = self.share(inter)
        self.params.append(Param(f"{layer}.w13", (len(gates), 2 * count, hidden), dtype))
        self.params.append(Param(f"{layer}.w2", (len(gates), hidden, count), dtype))
        for e, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
            for half, meta in enumerate((gate, up)):
                self.part(meta, (first, 0), (count, hidden), f"{layer}.w13", (2 * e + half) * count * hidden)
            self.part(down, (0, first), (hidden, count), f"{layer}.w2", e * hidden * count)


def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])


# --- one random system ---


def tiny_checkpoint(
    num_layers: int, num_experts: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inter: int, vocab: int
) -> tuple[TensorMeta, ...]:
    """Names and shapes like a Qwen3-MoE checkpoint's, plus a matrix that engines transpose and one with odd sizes."""
    found = [TensorMeta("model.embed_tokens.weight", (vocab, hidden), "bfloat16")]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj.weight": (heads * head_dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            "self_attn.o_proj.weight": (hidden, heads * head_dim),
            "input_layernorm.weight": (hidden,),
            "mlp.gate.weight": (num_experts, hidden),
        }.items():
            found.append(TensorMeta(f"{prefix}.{name}", shape, "bfloat16"))
        for expert in range(num_experts):
            for name, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
                found.append(TensorMeta(f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", shape, "bfloat16"))
    found.append(TensorMeta("model.norm.weight", (hidden,), "bfloat16"))
    found.append(TensorMeta("model.odd.weight", (3, 5), "bfloat16"))
    return tuple(found)


def shard_rows(meta: TensorMeta, edges: Sequence[int]) -> list[Region]:
    """Row shards between the edges."""
    rest = meta.shape[1:]
    return [Region((a, *(0,) * len(rest)), (b - a, *rest)) for a, b in itertools.pairwise(edges)]


@st.composite
def systems(draw: st.DrawFn) -> tuple[tuple[SourceLayout, ...], tuple[tuple[DestLayout, ...], ...]]:
    """Random trainer ranks (uneven rows, one owner, replicated, overlapping, columns) and engine replicas."""
    tp_sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    head_dim = draw(st.sampled_from([2, 3]))
    tensors = tiny_checkpoint(
        num_layers=draw(st.integers(1, 2)),
        num_experts=draw(st.sampled_from([2, 4])),
        hidden=draw(st.sampled_from([4, 8])),
        heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=head_dim,
        inter=draw(st.sampled_from([4, 8])),
        vocab=draw(st.sampled_from([8, 12])),
    )
    num_sources = draw(st.integers(1, 5))
    held: list[list[SourceShard]] = [[] for _ in range(num_sources)]
    for meta in tensors:
        kind = draw(st.sampled_from(["rows", "replicated", "one", "overlap", "columns"]))
        if kind == "rows":
            cuts = sorted(
                draw(st.lists(st.integers(0, meta.shape[0]), min_size=num_sources - 1, max_size=num_sources - 1))
            )
            regions = shard_rows(meta, [0, *cuts, meta.shape[0]])  # uneven, some of them empty, as FSDP2 leaves them
            for rank, region in enumerate(regions):
                held[rank].append(SourceShard(meta.name, region))
        elif kind == "columns" and len(meta.shape) == 2:
            cut = draw(st.integers(0, meta.shape[1]))
            for rank, (a, b) in enumerate(((0, cut), (cut, meta.shape[1]))):
                held[rank % num_sources].append(SourceShard(meta.name, Region((0, a), (meta.shape[0], b - a))))
        elif kind == "overlap":
            cut = draw(st.integers(0, meta.shape[0]))
            low = draw(st.integers(0, cut))
            for rank, (a, b) in enumerate(((0, cut), (low, meta.shape[0]))):
                held[rank % num_sources].append(SourceShard(meta.name, shard_rows(meta, [a, b])[0]))
        else:
            ranks = range(num_sources) if kind == "replicated" else [draw(st.integers(0, num_sources - 1))]
            for rank in ranks:
                held[rank].append(SourceShard(meta.name, shard_rows(meta, [0, meta.shape[0]])[0]))
    sources = tuple(SourceLayout(rank, tensors, tuple(shards)) for rank, shards in enumerate(held))
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]))
    with_padding = draw(st.integers(0, 2))
    return sources, tuple(
        tuple(engine_rank(tensors, rank, tp_size, dtype, with_padding) for rank in range(tp_size))
        for tp_size in tp_sizes
    )


def engine_rank(
    tensors: Sequence[TensorMeta], rank: int, tp_size: int, dtype: str = "bfloat16", padding: int = 1
) -> DestLayout:
    """What a TP engine's loader does with `tiny_checkpoint`."""
    metas = {meta.name: meta for meta in tensors}
    engine = EngineRank(rank, tp_size)
    engine.padded_vocab(metas["model.embed_tokens.weight"], padding, dtype)
    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in metas:
        prefix = f"model.layers.{layer}"
        attention = {x: metas[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkvo"}
        head_dim = attention["q"].shape[0] // 4
        kv_shards = min(tp_size, attention["k"].shape[0] // head_dim)
        engine.stacked_rows(
            f"{prefix}.qkv",
            [(attention["q"], tp_size), (attention["k"], kv_shards), (attention["v"], kv_shards)],
            dtype,
        )
        engine.column_split(attention["o"], dtype)
        engine.copied(metas[f"{prefix}.input_layernorm.weight"], "float32")
        engine.transposed(metas[f"{prefix}.mlp.gate.weight"], dtype)
        names = [f"{prefix}.mlp.experts.{e}" for e in range(metas[f"{prefix}.mlp.gate.weight"].shape[0])]
        engine.experts(
            f"{prefix}.experts",
            *([metas[f"{name}.{kind}_proj.weight"] for name in names] for kind in ("gate", "up", "down")),
            dtype=dtype,
        )
        layer += 1
    engine.copied(metas["model.norm.weight"], dtype, PostLoad.repack)
    engine.interleaved_columns("engine.side_by_side", metas["model.odd.weight"], metas["model.odd.weight"], dtype)
    engine.params.append(Param("engine.derived", (7,), "float32", PostLoad.derived))
    return engine.layout()
