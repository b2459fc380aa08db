"""The planner on one core, at the size of Kimi-K2: 256 trainer GPUs to 128 rollout GPUs.

    taskset -c 0 python bench/plan.py                merged FP8 weights into TP16 replicas
    taskset -c 0 python bench/plan.py --experts ep   ... experts whole, spread over the 16 ranks
    taskset -c 0 python bench/plan.py --adapter      r=32 adapters of all experts into EP16 slots, nothing else
    python bench/plan.py --layers 2 --experts-per-layer 32 --sources 16 --ep-size 16 --replicas 2   a small one

trainer/delivery/planned_layouts.py gives the trainer's layout. The engine's is written here by hand from the
architecture (config.json of Kimi-K2) and vLLM's parallel layers, so that planner and prediction can be measured without
an engine: MLA with heads split and low-rank projections replicated, shared expert and dense layer split, block-FP8
128x128 weights with float32 scales. (`slipstream plan` uses the engine's own recorded layouts.) Prints seconds, memory,
balance, the time of a publish's messages on this core, and the predicted publish, with these times of messages and
without. --out writes a file of bench/results.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.environment import environment  # noqa: E402
from slipstream.conf.architecture.families import read_config  # noqa: E402
from slipstream.conf.architecture.model_spec import ModelSpec  # noqa: E402
from slipstream.conf.load import load_run_config  # noqa: E402
from slipstream.conf.schema import LORA_TARGETS, LoraConfig, TrainerConfig  # noqa: E402
from slipstream.rollout.layouts.offline_slots import offline_slots  # noqa: E402
from slipstream.trainer.delivery.planned_layouts import PlannedTrainer  # noqa: E402
from slipstream.trainer.weights.adapter_names import adapter_tensors  # noqa: E402
from slipstream.trainer.weights.quantization import BlockFp8  # noqa: E402
from slipstream.weight_sync.calls.verbs import verb_of  # noqa: E402
from slipstream.weight_sync.layout import (  # noqa: E402
    Binding,
    Destination,
    DestLayout,
    Load,
    Param,
    Region,
    SourceLayout,
    TensorMeta,
)
from slipstream.weight_sync.plan.budget import Staging, reserved_bytes  # noqa: E402
from slipstream.weight_sync.plan.columns import spread  # noqa: E402
from slipstream.weight_sync.plan.plan import build_plan  # noqa: E402
from slipstream.weight_sync.plan.transfer_plan import TransferPlan  # noqa: E402
from slipstream.weight_sync.prediction.links import LinkRates, place  # noqa: E402
from slipstream.weight_sync.prediction.predict import predict  # noqa: E402
from slipstream.weight_sync.publish.address_book import AddressBook  # noqa: E402
from slipstream.weight_sync.publish.sums import Places, Sums  # noqa: E402
from slipstream.weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes  # noqa: E402
from slipstream.weight_sync.replica.expected import Planned  # noqa: E402
from slipstream.weight_sync.replica.messages import Begun, Bound, Expected, PublishId, ReplicaVerbs  # noqa: E402
from slipstream.weight_sync.typed_msgpack import pack, unpack  # noqa: E402

T = TypeVar("T")
FP8, BF16, F32 = "float8_e4m3fn", "bfloat16", "float32"
HIDDEN, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V = 7168, 64, 1536, 512, 128, 64, 128
WIDTH, DENSE_WIDTH, VOCAB, BLOCK = 2048, 18432, 163840, 128


class Model:
    """Collects the tensors of a checkpoint."""

    def __init__(self) -> None:
        self.tensors: list[TensorMeta] = []

    def add(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Add a tensor and, if it is block-FP8, its scales."""
        self.tensors.append(TensorMeta(name, shape, dtype))
        if dtype == FP8:
            scales = tuple(-(-size // BLOCK) for size in shape)
            self.tensors.append(TensorMeta(f"{name}_scale_inv", scales, F32))


def kimi_k2(layers: int, experts: int) -> list[TensorMeta]:
    """Kimi-K2's FP8 checkpoint: the first layer is dense, the others have experts and a shared expert."""
    model = Model()
    model.add("model.embed_tokens.weight", (VOCAB, HIDDEN), BF16)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        model.add(f"{prefix}.input_layernorm.weight", (HIDDEN,), BF16)
        model.add(f"{prefix}.post_attention_layernorm.weight", (HIDDEN,), BF16)
        model.add(f"{attention}.q_a_proj.weight", (Q_RANK, HIDDEN), FP8)
        model.add(f"{attention}.q_a_layernorm.weight", (Q_RANK,), BF16)
        model.add(f"{attention}.q_b_proj.weight", (HEADS * (NOPE + ROPE), Q_RANK), FP8)
        model.add(f"{attention}.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, HIDDEN), FP8)
        model.add(f"{attention}.kv_a_layernorm.weight", (KV_RANK,), BF16)
        model.add(f"{attention}.kv_b_proj.weight", (HEADS * (NOPE + V), KV_RANK), FP8)
        model.add(f"{attention}.o_proj.weight", (HIDDEN, HEADS * V), FP8)
        if layer == 0:
            add_mlp(model, f"{prefix}.mlp", DENSE_WIDTH)
            continue
        model.add(f"{prefix}.mlp.gate.weight", (experts, HIDDEN), BF16)
        model.add(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), F32)
        add_mlp(model, f"{prefix}.mlp.shared_experts", WIDTH)
        for expert in range(experts):
            add_mlp(model, f"{prefix}.mlp.experts.{expert}", WIDTH)
    model.add("model.norm.weight", (HIDDEN,), BF16)
    model.add("lm_head.weight", (VOCAB, HIDDEN), BF16)
    return model.tensors


def add_mlp(model: Model, prefix: str, width: int) -> None:
    """gate, up and down."""
    model.add(f"{prefix}.gate_proj.weight", (width, HIDDEN), FP8)
    model.add(f"{prefix}.up_proj.weight", (width, HIDDEN), FP8)
    model.add(f"{prefix}.down_proj.weight", (HIDDEN, width), FP8)


class Engine:
    """Collects one rank's parameters as the loader fills them."""

    def __init__(self, rank: int, tp_size: int) -> None:
        self.rank, self.tp_size = rank, tp_size
        self.params: dict[str, tuple[list[int], str]] = {}
        self.loads: list[Load] = []

    def layout(self) -> DestLayout:
        """What was collected."""
        params = tuple(Param(name, tuple(shape), dtype) for name, (shape, dtype) in self.params.items())
        return DestLayout(self.rank, params, tuple(self.loads))

    def put(self, param: str, meta: TensorMeta, split: int | None) -> None:
        """Load this rank's part (along dim `split`, or all) below what the parameter holds already."""
        start, shape = [0] * len(meta.shape), list(meta.shape)
        if split is not None:
            shape[split] //= self.tp_size
            start[split] = self.rank * shape[split]
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        held, _ = self.params.setdefault(param, ([0, *shape[1:]], meta.dtype))
        region = Region(tuple(start), tuple(shape))
        self.loads.append(Load(meta.name, region, tuple(range(len(shape))), param, prod(held), stride))
        held[0] += shape[0]


def engine_rank(
    metas: dict[str, TensorMeta], layers: int, experts: int, rank: int, tp_size: int, expert_parallel: bool
) -> DestLayout:
    """vLLM's DeepSeek-V3 classes, one rank of tp_size."""
    engine = Engine(rank, tp_size)

    def put(param: str, names: list[str], split: int | None) -> None:
        for suffix in ("", "_scale_inv"):
            for name in names:
                if name + suffix in metas:
                    engine.put(param + suffix, metas[name + suffix], split)

    put("model.embed_tokens.weight", ["model.embed_tokens.weight"], 0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        for name in ("input_layernorm", "post_attention_layernorm"):
            put(f"{prefix}.{name}.weight", [f"{prefix}.{name}.weight"], None)
        low = [f"{attention}.q_a_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight"]
        put(f"{attention}.fused_qkv_a_proj.weight", low, None)
        for name, split in (("q_a_layernorm", None), ("kv_a_layernorm", None), ("q_b_proj", 0), ("kv_b_proj", 0)):
            put(f"{attention}.{name}.weight", [f"{attention}.{name}.weight"], split)
        put(f"{attention}.o_proj.weight", [f"{attention}.o_proj.weight"], 1)
        dense = mlp if layer == 0 else f"{mlp}.shared_experts"
        put(f"{dense}.gate_up_proj.weight", [f"{dense}.gate_proj.weight", f"{dense}.up_proj.weight"], 0)
        put(f"{dense}.down_proj.weight", [f"{dense}.down_proj.weight"], 1)
        if layer == 0:
            continue
        put(f"{mlp}.gate.weight", [f"{mlp}.gate.weight"], None)
        put(f"{mlp}.gate.e_score_correction_bias", [f"{mlp}.gate.e_score_correction_bias"], None)
        put_experts(engine, metas, f"{mlp}.experts", experts, expert_parallel)
    put("model.norm.weight", ["model.norm.weight"], None)
    put("lm_head.weight", ["lm_head.weight"], 0)
    return engine.layout()


def put_experts(engine: Engine, metas: dict[str, TensorMeta], prefix: str, experts: int, expert_parallel: bool) -> None:
    """w13 (gate above up) and w2, with their scales."""
    local = range(experts)
    if expert_parallel:
        local = range(engine.rank * experts // engine.tp_size, (engine.rank + 1) * experts // engine.tp_size)
    for suffix in ("", "_scale_inv"):
        for param, names, split in (("w13_weight", ("gate_proj", "up_proj"), 0), ("w2_weight", ("down_proj",), 1)):
            for at, expert in enumerate(local):
                for part, name in enumerate(names):
                    meta = metas[f"{prefix}.{expert}.{name}.weight{suffix}"]
                    shape, start = list(meta.shape), [0, 0]
                    if not expert_parallel:
                        shape[split] //= engine.tp_size
                        start[split] = engine.rank * shape[split]
                    full = [len(local), len(names) * shape[0], shape[1]]
                    engine.params.setdefault(f"{prefix}.{param}{suffix}", (full, meta.dtype))
                    offset = (at * len(names) + part) * prod(shape)
                    region = Region(tuple(start), tuple(shape))
                    stride = (shape[1], 1)
                    engine.loads.append(Load(meta.name, region, (0, 1), f"{prefix}.{param}{suffix}", offset, stride))


def record(args: argparse.Namespace, cache: Path) -> None:
    """Write the engine's layouts where a cache would hold them."""
    if args.adapter:
        factors = adapter_tensors(model_of(args)[0].checkpoint_tensors(BF16), lora_of(args))
        ranks = offline_slots(factors, tp_size=args.tp, enable_expert_parallel=True, num_kv_heads=HEADS)
    else:
        metas = {meta.name: meta for meta in kimi_k2(args.layers, args.experts_per_layer)}
        shape = (metas, args.layers, args.experts_per_layer)
        ranks = [engine_rank(*shape, r, args.tp, args.experts == "ep") for r in range(args.tp)]
    cache.write_bytes(layouts_to_bytes(ranks))


def model_of(args: argparse.Namespace) -> tuple[ModelSpec, BlockFp8 | None]:
    """Kimi-K2 as the presets have it, at the size that is asked for."""
    config = dict(load_run_config(["experiment=kimi_k2_fp8_merged"]).model.hf_config)
    config |= {"num_hidden_layers": args.layers, "n_routed_experts": args.experts_per_layer}
    return read_config(config), BlockFp8.from_hf_config(config)


def lora_of(args: argparse.Namespace) -> LoraConfig:
    """With --adapter: adapters of all experts and of nothing else."""
    return LoraConfig(rank=args.rank, targets=("experts",) if args.adapter else LORA_TARGETS)


def sources_of(args: argparse.Namespace) -> Sequence[SourceLayout]:
    """What the trainer's ranks report."""
    spec, quantization = model_of(args)
    trainer = TrainerConfig(num_ranks=args.sources, ep_size=args.ep_size, lora=lora_of(args))
    planned = PlannedTrainer(spec, BF16, trainer)
    return planned.adapter_layouts() if args.adapter else planned.layouts(quantization)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Record in a process of its own, so that its memory does not count; then plan and predict."""
    with tempfile.NamedTemporaryFile() as cache:
        recorder = multiprocessing.get_context("fork").Process(target=record, args=(args, Path(cache.name)))
        recorder.start()
        recorder.join()
        return figures(args, sources_of(args), Path(cache.name))


def figures(args: argparse.Namespace, sources: Sequence[SourceLayout], cache: Path) -> dict[str, Any]:
    """The figures: from a cached layout to a proven plan, and its predicted."""
    began = time.perf_counter()
    layouts = layouts_from_bytes(cache.read_bytes())
    read_s = time.perf_counter() - began
    held = reserved_bytes("cuda", args.watermark, 0)
    staging = Staging(watermark_bytes=args.watermark, reserved_bytes=held)
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = build_plan(sources, [layouts] * args.replicas, max_task_bytes=staging.max_task_bytes)
    plan_s, plan_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    summary = plan.summary()
    placement = place(list(plan.tasks), list(plan.expected), 8)
    found: dict[str, Any] = {
        "tensors": len(sources[0].tensors),
        "rows": sum(table.num_rows for table in plan.tasks.values()),
        "tasks": summary.num_tasks,
        "cache_bytes": cache.stat().st_size,
        "read_s": read_s,
        "plan_s": plan_s,
        "plan_cpu_s": plan_cpu_s,
        "peak_rss_bytes": peak,
        "bytes": summary.num_bytes,
        "send_balance": summary.send_balance,
        "receive_balance": summary.receive_balance,
        "receiver_bytes": summary.num_bytes / len(summary.received_bytes),
        "node_duplicates": node_duplicates(plan),
    }
    messages = found["messages"] = message_seconds(plan)
    found["entry_s"] = entry_seconds(messages)
    for rate in (50e9, 44e9):
        rates = replace(rates_of(args, rate), entry_s=found["entry_s"])
        predicted = predict(plan, placement, rates, staging)
        found[f"predicted_{rate / 1e9:g}"] = {
            key: value for key, value in asdict_shallow(predicted).items() if isinstance(value, float)
        } | {"total_without_messages_s": predicted.total_s - predicted.messages_s, "peak_bytes": predicted.peak_bytes}
    return found


def rates_of(args: argparse.Namespace, nic_bytes_s: float) -> LinkRates:
    """The link rates; engines are paused only for whole weights."""
    rates = LinkRates(nic_bytes_s=nic_bytes_s)
    return rates.without_pause() if args.adapter else rates


def message_seconds(plan: TransferPlan) -> dict[str, float]:
    """This core's seconds for the messages of one publish that delay its bytes.

    Per replica, rank 0 asks, reads where to write and writes what to expect. A replica reads that and passes it to its
    ranks, each of which takes its own part. Every trainer rank's counting is left out: it counts load by load, while
    the next load is written.
    """
    begin, commit, publish = verb_of(ReplicaVerbs.begin), verb_of(ReplicaVerbs.commit), PublishId("", 1, 1, "")
    names = {id(params): tuple(params) for params in plan.expected.values()}
    places = Places({dest: names[id(params)] for dest, params in plan.expected.items()})
    sums = Sums(places, np.full((2, places.size), 1 << 40, np.int64))
    sums.table[0] = [size for sizes in plan.expected.values() for size in sizes.values()]
    replicas = sorted({replica for replica, _ in plan.expected})
    ranks = {replica: [dest for dest in plan.expected if dest[0] == replica] for replica in replicas}
    bindings = {dest: Binding("host:1", dict.fromkeys(names, 1 << 46)) for dest, names in places.params.items()}
    params = {replica: [places.params[dest] for dest in own] for replica, own in ranks.items()}
    seconds: dict[str, float] = {}
    planned = {id(sizes): Planned.of(sizes) for sizes in plan.expected.values()}  # made at connect
    book = AddressBook()

    def timed(name: str, make: Callable[[], T]) -> T:
        began = time.perf_counter()
        made = make()
        seconds[name] = time.perf_counter() - began
        return made

    def answers() -> list[bytes]:
        """The replicas' answers to Begin."""
        said = {n: tuple(Bound.of(bindings[dest], book.known(n)) for dest in own) for n, own in ranks.items()}
        return [pack(Begun(bound, 0.0, 0.0)) for bound in said.values()]

    def read_begun(begun: Sequence[bytes]) -> None:
        for replica, message in zip(replicas, begun, strict=True):
            reply = begin.result.decode(message)
            book.learn(replica, book.check(replica, reply.bindings, params[replica]))

    def read_commit(given: bytes) -> None:
        """Read as the worker does, then as its last rank does."""
        _, expected = commit.arguments.decode(given)
        handed_on = unpack(tuple[Expected, ...], pack(expected))
        planned[id(plan.expected[ranks[0][-1]])].read(handed_on[-1])

    def told(dest: Destination) -> Expected:
        return planned[id(plan.expected[dest])].write(*sums.part(dest))

    every_address = answers()
    timed("rank_0_reads_every_address_once_s", lambda: read_begun(every_address))
    timed("rank_says_where_it_is_s", lambda: Bound.of(bindings[ranks[0][0]], book.known(0)))
    begun = answers()
    timed("rank_0_asks_s", lambda: [begin.given(publish, book.known(replica)) for replica in replicas])
    timed("rank_0_reads_begun_s", lambda: read_begun(begun))
    commits = timed(
        "rank_0_writes_commit_s", lambda: [commit.given(publish, tuple(map(told, own))) for own in ranks.values()]
    )
    timed("replica_reads_commit_s", lambda: read_commit(commits[0]))
    tasks = list(max(plan.tasks.values(), key=len))
    columns = np.array([places.column((t.replica, t.dest_rank), t.param) for t in tasks], np.int64)
    sizes = np.array([t.num_bytes for t in tasks], np.int64)
    counted = Sums(places)
    timed("rank_counts_all_loads_s", lambda: counted.add(columns, sizes, sizes))
    entries = {"entries": places.size, "entries_of_a_replica": sum(map(len, params[0]))}
    return seconds | entries | {"tasks_of_a_rank": len(tasks), "commit_bytes": sum(map(len, commits))}


def entry_seconds(measured: dict[str, float]) -> float:
    """LinkRates.entry_s as measured: rank 0's seconds per entry, or a replica's if they are more."""
    by_rank_0 = sum(measured[step] for step in ("rank_0_asks_s", "rank_0_reads_begun_s", "rank_0_writes_commit_s"))
    return max(by_rank_0 / measured["entries"], measured["replica_reads_commit_s"] / measured["entries_of_a_replica"])


def asdict_shallow(value: Any) -> dict[str, Any]:
    """The fields of a prediction, and its floor."""
    return {name: getattr(value, name) for name in value.__slots__} | {"floor_s": value.floor_s}


def node_duplicates(plan: TransferPlan, ranks_per_node: int = 8) -> float:
    """The part of the bytes that a relay inside the node would save the NICs: equal bytes to several GPUs of a node.

    Rows count as equal when they have the same source, dtype and pieces; replica and node are those of the GPU.
    """
    spared = total = 0
    for table in plan.tasks.values():
        (row, _), pieces = spread(table.num_pieces), table.pieces
        marks = np.zeros(table.num_rows, np.uint64)
        with np.errstate(over="ignore"):
            mixed = pieces.tensor.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            for d in range(pieces.start.shape[1]):
                for column, odd in ((pieces.start[:, d], 0xBF58476D1CE4E5B9), (pieces.shape[:, d], 0x94D049BB133111EB)):
                    mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(odd + 2 * d)
            np.add.at(marks, row, mixed ^ pieces.offset.astype(np.uint64))
        node = table.dest_rank // ranks_per_node
        sizes = table.num_bytes * table.num_replicas
        key = np.stack([marks, node.astype(np.uint64), table.num_bytes.astype(np.uint64)], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        total += int(sizes.sum())
        spared += int(sizes.sum() - sizes[first].sum())
    return spared / total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", choices=("tp", "ep"), default="tp")
    parser.add_argument("--adapter", action="store_true")
    for name, value in (("layers", 61), ("experts-per-layer", 384), ("sources", 256), ("replicas", 8), ("tp", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ep-size", type=int, default=256, help="of the trainer")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--watermark", type=int, default=1 << 30)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"environment": environment(args.commit)} | measure(args)
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
