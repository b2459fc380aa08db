"""A publish between two sites: what it sends and how long it takes over a slow link: every byte, what changed, or the
factors of adapters, which the engine merges.

    sudo python bench/slow_links.py                            10, 1 and 0.1 Gbit/s; 1, 3 and 10 % changed; rank 16

Two network namespaces are the sites, with a pair of virtual interfaces between them, each limited by `tc` (tbf). One
process on either side: tensors in memory behind a Sender, and the same tensors behind a replica's endpoint, on a CPU,
over Mooncake's TCP. Changes are found by comparing with what was sent last, as for tensors of any trainer, full
training and `slipstream push --base`. Adapters, in float32 on every matrix, are merged by both sides. Every publish is
hashed and committed. Bytes of the link are those that the sender's interface has counted, headers included. Medians;
the first publish of a row warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slipstream.conf.schema import WeightSyncConfig
    from slipstream.weight_sync.publish.report import PublishReport

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.environment import environment  # noqa: E402
from bench.sync.engine_process import KEY, PlainReplica  # noqa: E402

MIB = 1 << 20
SITES = {"slipstream-a": "10.213.0.1", "slipstream-b": "10.213.0.2"}
"""Namespace -> address: the trainer's, the engine's."""
INTERFACE = "slow0"
BURST_S = 0.004
"""tbf lets through at once what it may send in so many seconds: a tick of the kernel's clock."""


@dataclass(frozen=True)
class Row:
    """One kind of publish over one link. Example: Row(gbit_s=1.0, changed=0.01)."""

    gbit_s: float
    changed: float | None
    """Share of all elements; None: every byte is sent, to an engine without a landing zone."""
    rank: int = 0
    """The adapters' rank; 0: none, and the engine merges nothing."""


def main() -> None:
    """Measure every row; print a table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit-s", type=float, nargs="+", default=[10.0, 1.0, 0.1])
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03, 0.1], help="shares of the elements")
    parser.add_argument("--rank", type=int, default=16, help="of adapters that the engine merges; 0: no such row")
    parser.add_argument("--mib", type=int, default=128, help="size of the weights; default %(default)s")
    parser.add_argument("--publishes", type=int, default=3, help="that are measured; default %(default)s")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "slow_links-cpu.json")
    parser.add_argument("--role", choices=["trainer", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        asyncio.run(serve(args.mib, Row(**json.loads(args.row))))
        return
    if args.role == "trainer":
        publish(args.mib, args.publishes, Row(**json.loads(args.row)))
        return
    found = {**environment(), "mib": args.mib, "rows": []}
    print(json.dumps(found), flush=True)
    for gbit_s in args.gbit_s:
        rows = [Row(gbit_s, changed) for changed in (None, *args.changed)]
        for row in rows + [Row(gbit_s, None, args.rank)] * (args.rank > 0):
            with sites(gbit_s):
                found["rows"].append(measure(args, row))
            print(in_words(found["rows"][-1]), flush=True)
    args.json.write_text(json.dumps(found, indent=1) + "\n")


def in_words(row: dict[str, Any]) -> str:
    """A row of the table."""
    kind = "whole" if row["changed"] is None else f"{row['changed']:.1%} changed"
    kind = f"factors, r={row['rank']}" if row["rank"] else kind
    return (
        f"{row['gbit_s']:>5g} Gbit/s  {kind:>14}  {row['total_s']:8.3f} s  write {row['write_s']:8.3f} s  verify "
        f"{row['verify_s']:6.3f} s  {row['num_bytes'] / 1e6:9.2f} MB, {row['link_bytes'] / 1e6:9.2f} MB on the link"
    )


@contextlib.contextmanager
def sites(gbit_s: float) -> Iterator[None]:
    """Two namespaces with a link of this rate between them; gone afterwards."""
    first, second = SITES
    burst = max(int(gbit_s * 1e9 / 8 * BURST_S), 64 << 10)
    try:
        for site in SITES:
            run("ip", "netns", "add", site)
        run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for site, address in SITES.items():
            run("ip", "-n", site, "address", "add", f"{address}/30", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                run("ip", "-n", site, "link", "set", interface, "up")
            rate = ("rate", f"{gbit_s * 1000:g}mbit", "burst", str(burst), "limit", str(8 * burst))
            run("tc", "-n", site, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate)
        yield
    finally:
        for site in SITES:
            subprocess.run(["ip", "netns", "delete", site], check=False, capture_output=True)


def measure(args: argparse.Namespace, row: Row) -> dict[str, Any]:
    """One row, by a process in each namespace."""
    trainer, engine = (start(site, role, args, row) for site, role in zip(SITES, ("trainer", "engine"), strict=True))
    try:
        assert engine.stdout and trainer.stdin and trainer.stdout
        trainer.stdin.write(answer_of(engine))
        trainer.stdin.flush()
        return asdict(row) | json.loads(answer_of(trainer))
    finally:
        for process in (trainer, engine):
            process.kill()
            process.wait(60)


def answer_of(process: subprocess.Popen[str]) -> str:
    """The line that a process prints as its answer; libraries may print others before."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "tcp://")):
            return line
    raise RuntimeError(f"{' '.join(process.args[4:])} ended without an answer")  # type: ignore[index]


def start(site: str, role: str, args: argparse.Namespace, row: Row) -> subprocess.Popen[str]:
    """Start this script in a namespace."""
    words = ["--role", role, "--row", json.dumps(asdict(row)), "--mib", str(args.mib), "--publishes"]
    command = ["ip", "netns", "exec", site, sys.executable, __file__, *words, str(args.publishes)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def serve(mib: int, row: Row) -> None:
    """The engine's side: print the endpoint, then serve until killed."""
    from bench.sync.lora_matrices import merges_of
    from slipstream.conf.schema import TransportKind
    from slipstream.weight_sync.layout import DestLayout, Load, Param, Region
    from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint
    from slipstream.weight_sync.replica.own_merge import OwnMerge
    from slipstream.weight_sync.replica.receiver import Receiver
    from slipstream.weight_sync.transport.mooncake import MooncakeTransport

    _, host = SITES.values()
    params = {name: tensor.zero_() for name, tensor in weights(mib).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    layout = DestLayout(
        0,
        tuple(Param(name, shape, "bfloat16") for name, shape in shapes.items()),
        tuple(Load(name, Region((0, 0), shape), (0, 1), name, 0, (shape[1], 1)) for name, shape in shapes.items()),
    )
    link = MooncakeTransport(TransportKind.tcp, host=host)
    own = None
    if row.rank:
        base = weights(mib)
        own = OwnMerge(layout, params, merges_of(base, row.rank), on_device=False)

        def read(tensor: str, region: Region, out: torch.Tensor) -> None:
            out.copy_(base[tensor])

        own.read_base(read)
        params, layout = params | own.factors, own.layout
    receiver = Receiver(params, layout, link, landing_bytes=zone_bytes(mib, row), own_merge=own)
    endpoint = ReplicaEndpoint(PlainReplica(receiver), KEY, host=host)
    print(await endpoint.start(), flush=True)
    await asyncio.Event().wait()


def publish(mib: int, num_publishes: int, row: Row) -> None:
    """The trainer's side: read the endpoint, publish, print medians."""
    import torch

    from slipstream.conf.schema import TransportKind, WeightSyncConfig
    from slipstream.weight_sync.api import Sender, register_tensors

    tensors = weights(mib)
    endpoint = sys.stdin.readline().strip()
    config = WeightSyncConfig(
        transport=TransportKind.tcp, delta_bytes=zone_bytes(mib, row), watermark_bytes=256 * MIB, timeout_s=300.0
    )
    host, _ = SITES.values()
    if row.rank:
        publish_factors(tensors, endpoint, num_publishes, row, config)
        return
    sender = Sender(register_tensors(tensors), [endpoint], key=KEY, host=host, device="cpu", config=config)
    generator = torch.Generator().manual_seed(1)
    warm_up = 2 if row.changed is not None else 1  # the first one is whole
    measured: list[dict[str, float]] = []
    for version in range(warm_up + num_publishes):
        for tensor in tensors.values():
            hit = torch.rand(tensor.shape, generator=generator) < (row.changed or 0.01)
            tensor.view(torch.int16)[hit] ^= 1
        measured.append(figures_of(lambda version=version: sender.update(version)))
    print(json.dumps(medians(measured[warm_up:])), flush=True)


def publish_factors(
    tensors: dict[str, torch.Tensor], endpoint: str, num_publishes: int, row: Row, config: WeightSyncConfig
) -> None:
    """publish() of adapters, to an engine that has the matrices."""
    from bench.sync.lora_matrices import LoraMatrices, merges_of
    from slipstream.weight_sync.publish.publisher import Publisher
    from slipstream.weight_sync.transport.mooncake import MooncakeTransport

    merges = merges_of(tensors, row.rank)
    source, base = LoraMatrices(tensors, merges), LoraMatrices(tensors, merges, is_merged=False)
    link = MooncakeTransport(config.transport, device="cpu", host=next(iter(SITES.values())))
    sender = Publisher(source, link, rank=0, world_size=1, group=None, config=config, key=KEY, base=base)
    sender.connect([endpoint])
    measured: list[dict[str, float]] = []
    for version in range(1 + num_publishes):
        for factor in source.factors.values():
            factor.mul_(1.01)
        measured.append(figures_of(lambda version=version: sender.publish(version)))
    print(json.dumps(medians(measured[1:])), flush=True)


def figures_of(send: Callable[[], PublishReport]) -> dict[str, float]:
    """Send once."""
    before = sent_by_interface()
    report = send()
    assert report.num_committed == 1, report.replicas
    names = ("total_s", "write_s", "prepare_s", "verify_s", "num_bytes")
    figures: dict[str, float] = {name: getattr(report, name) for name in names}
    return figures | {"link_bytes": sent_by_interface() - before}


def medians(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """Name by name."""
    return {name: statistics.median(one[name] for one in measured) for name in measured[0]}


def weights(mib: int) -> dict[str, torch.Tensor]:
    """Random bfloat16 matrices of 4 MiB."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}": torch.randn(1024, 2048, generator=generator).bfloat16() for n in range(mib // 4)}


def zone_bytes(mib: int, row: Row) -> int:
    """Room for what a quarter of all elements need."""
    return 0 if row.changed is None else mib * MIB // 2


def sent_by_interface() -> int:
    """Bytes that this side has sent, as its interface counts them."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def run(*command: str) -> None:
    """Run a command of iproute2. Ends the bench with its words if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()} (root is needed)")


if __name__ == "__main__":
    main()
