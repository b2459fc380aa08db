"""What an engine pays for merging adapters itself (weight_sync.remote_merge): a layer's experts at once, or one by one.

    python bench/own_merge.py            Qwen3-30B-A3B's experts, r=32, one GPU
    python bench/own_merge.py --tiny     small ones, on a CPU if there is no GPU

A layer has w13 and w2 of all experts. At once: each is a run of bands, one launch (weight_sync/merging/factors.py).
One by one: the same matrices as parameters of their own, one launch for each gate, up and down. The base lies on the
GPU or, page-locked, in host memory. Both ways must leave the same bytes. `issued` is when the host has launched
everything, `done` when the device has finished; medians of --repeats, and --layers times as much. Prints a table.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, shrink  # noqa: E402
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, TensorMeta  # noqa: E402
from slipstream.weight_sync.merging.factors import A_SUFFIX, B_SUFFIX, Merge  # noqa: E402
from slipstream.weight_sync.replica.own_merge import OwnMerge  # noqa: E402

SCALE, KEYS = 2.0, {"w13": 1, "w2": 2}


def experts_of(args: argparse.Namespace) -> list[tuple[str, str, int, Merge]]:
    """(stack, tensor, rows before it in the stack, merge) of gate, up and down of every expert."""
    found: list[tuple[str, str, int, Merge]] = []
    for expert in range(args.experts):
        for leaf, stack, first, rows, columns in (
            ("gate", "w13", 0, args.width, args.hidden),
            ("up", "w13", args.width, args.width, args.hidden),
            ("down", "w2", 0, args.hidden, args.width),
        ):
            tensor, shared = f"{expert}.{leaf}", f"{expert}.{stack}{A_SUFFIX}"
            under = 2 * args.width if stack == "w13" else args.hidden
            merge = Merge(
                tensor, TensorMeta(shared, (args.rank, columns), "float32"),
                TensorMeta(tensor + B_SUFFIX, (rows, args.rank), "float32"),
                SCALE, first, under, expert * under, KEYS[stack],
            )  # fmt: skip
            found.append((stack, tensor, expert * under + first, merge))
    return found


def layout_of(args: argparse.Namespace, *, at_once: bool) -> DestLayout:
    """An engine of one rank, with stacks or with a parameter for each matrix."""
    params: dict[str, int] = {}
    loads: list[Load] = []
    for stack, tensor, first, merge in experts_of(args):
        shape = (merge.b.shape[0], merge.a.shape[1])
        name, offset = (stack, first * shape[1]) if at_once else (tensor, 0)
        params[name] = params.get(name, 0) + shape[0] * shape[1]
        loads.append(Load(tensor, Region((0, 0), shape), (0, 1), name, offset, (shape[1], 1)))
    return DestLayout(0, tuple(Param(name, (size,), "bfloat16") for name, size in params.items()), tuple(loads))


def measure(args: argparse.Namespace, device: torch.device, *, at_once: bool, on_device: bool) -> list[Tensor]:
    """Print a row of the table. Returns what was merged, matrix by matrix."""
    experts, layout = experts_of(args), layout_of(args, at_once=at_once)
    params = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16, device=device) for p in layout.params}
    own = OwnMerge(layout, params, [merge for *_, merge in experts], on_device=on_device)

    def read(tensor: str, region: Region, out: Tensor) -> None:
        del region  # values are as good anywhere
        seed = sum(number * byte for number, byte in enumerate(tensor.encode(), 1))
        values = torch.empty(out.shape).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
        out.copy_(values)

    own.read_base(read)
    for load in own.layout.loads[len(layout.loads) :]:
        read(load.tensor, load.region, own.factors[load.param].view(-1).as_strided(
            load.region.shape, load.stride, load.offset))  # fmt: skip
    own.apply()
    issued, done = [], []
    for _ in range(args.repeats):
        wait_for(device)
        began = time.perf_counter()
        own.apply()
        issued.append(time.perf_counter() - began)
        wait_for(device)
        done.append(time.perf_counter() - began)
    of_model = args.layers * statistics.median(done)
    where = "GPU" if on_device else "host"
    print(
        f"{'at once' if at_once else 'one by one':<12}{where:<6}{2 if at_once else len(experts):>9}"
        f"{1e3 * statistics.median(issued):>12.2f}{1e3 * statistics.median(done):>12.2f}{of_model:>12.2f}", flush=True,
    )  # fmt: skip
    return [params[load.param].as_strided(load.region.shape, load.stride, load.offset) for load in layout.loads]


def wait_for(device: torch.device) -> None:
    """Until a GPU has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(environment())
    print(f"{'':<12}{'base':<6}{'launches':>9}{'issued, ms':>12}{'done, ms':>12}{f'x {args.layers}, s':>12}")
    for on_device in (True, False) if device.type == "cuda" else (False,):
        both = [measure(args, device, at_once=at_once, on_device=on_device) for at_once in (True, False)]
        assert all(torch.equal(some, others) for some, others in zip(*both, strict=True)), "the same bytes"


if __name__ == "__main__":
    main()
