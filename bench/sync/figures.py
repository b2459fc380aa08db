"""The table and the picture of bench/weight_sync.py's JSON.

python bench/sync/figures.py bench/results/weight_sync-gpu-1x1.json
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
PARTS = (("begin", "#56B4E9"), ("transfer", "#0072B2"), ("verify", "#E69F00"), ("commit", "#009E73"))
"""Consecutive parts of a publish. The rest is the transfer: packing, gathering and writing, overlapped."""


def show(report: dict[str, Any]) -> None:
    for engine in report["engines"]:
        wire = engine["wire"]["gb_per_s"]
        num_bytes = engine["rows"][0]["num_bytes"]
        where = " on the trainer's own GPUs" if report.get("is_colocated") else ""
        load = f"{engine['num_requests']} requests; {num_bytes / 1e9:.2f} GB"
        print(f"\n{report['plan']}{where} -> {engine['engine']}, {load}")
        print(f"bare wire ({engine['wire']['link']}): {wire:.1f} GB/s a rank, {engine['num_generated_tokens']} tokens")
        _line("row", "total_s", "min", "max", "begin", "idle", "mark", "prepare", "write", "GB/s", "of wire", "verify",
              "commit", "rest", "pause", "excess", "budget", "account", "trainer", "engine", "handed")  # fmt: skip
        for row in engine["rows"]:
            seconds = [row[f"{name}_s"] for name in ("begin", "idle", "mark", "prepare", "write")]
            memory = [row[name] for name in ("watermark_bytes", "accounted_peak_bytes", "trainer_growth_bytes")]
            memory += [row["engine_growth_bytes"], row.get("engine_handed_out_bytes")]
            rate = row["write_gb_per_s_per_rank"]
            if row.get("share") is not None:
                alone = " ".join(f"{name}={value:.4f}" for name, value in row["parts"].items() if "host" not in name)
                sent = f"{row['changed_fraction']:.2%} changed, {row['num_bytes'] / 1e9:.2f} GB sent"
                print(f"{row['title']}: {sent}; alone: {alone}")
            _line(row["title"], *(f"{row[f'total_s{end}']:.4f}" for end in ("", "_min", "_max")),
                  *(f"{value:.4f}" for value in seconds), f"{rate:.1f}", f"{rate / wire:.0%}",
                  *(f"{row[f'{name}_s']:.4f}" for name in ("verify", "commit")),
                  f"{row['rest_s']:.4f}" if "rest_s" in row else "-",
                  *(f"{row[f'{name}_s']:.4f}" for name in ("pause", "excess_pause")),
                  *("-" if value is None else f"{value / MIB:.1f}M" for value in memory))  # fmt: skip
        with_hashes, without = (next(r for r in engine["rows"] if r["title"] == t) for t in ("hashes", "no hashes"))
        print(f"hashes cost {_cost(with_hashes, without):+.1%} of a publish, by medians without the wait for steps")
        for name, peer in engine["peers"].items():
            if "failed" in peer:
                print(f"peer {name}: failed: {peer['failed']}")
            else:
                times = peer["median_s"] / with_hashes["total_s"]
                print(f"peer {name}: {peer['median_s']:.3f} s, {times:.1f} times a publish ({peer})")
    print(report["peers_include"])


def _cost(with_hashes: dict[str, Any], without: dict[str, Any]) -> float:
    """Time that hashes add, as a part of a publish without them. The difference leaves out the wait for the steps in
    flight, because hashes do not change it and it varies by more than they cost."""
    own = [statistics.median(r["total_s"] - r["idle_s"] for r in row["reports"]) for row in (with_hashes, without)]
    return (own[0] - own[1]) / without["total_s"]


def _line(*cells: str) -> None:
    print(" ".join(f"{cell:>9}" for cell in cells))


def plot(report: dict[str, Any], file: Path) -> None:
    """Plot stacked bars of every row, and the peers."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"no matplotlib here; elsewhere: python bench/sync/figures.py {file.with_suffix('.json')}")
        return
    bars: list[tuple[str, dict[str, float]]] = []
    for engine in report["engines"]:
        for row in engine["rows"]:
            known = {name: row[f"{name}_s"] for name in ("begin", "verify", "commit")}
            parts = known | {"transfer": row["total_s"] - sum(known.values())}
            bars.append((f"{engine['engine']}, {row['title']}", parts))
        for name, peer in engine["peers"].items():
            if "median_s" in peer:
                bars.append((name, {"peer": peer["median_s"]}))
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(bars) + 1.2))
    colors = dict(PARTS) | {"peer": "#999999"}
    for index, (_, parts) in enumerate(bars):
        left = 0.0
        for name in [name for name in colors if name in parts]:
            axes.barh(index, parts[name], left=left, color=colors[name])
            left += parts[name]
        axes.text(left, index, f" {left:.3f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("seconds, median")
    num_bytes = report["engines"][0]["rows"][0]["num_bytes"]
    axes.set_title(f"{report['plan']}: {num_bytes / 1e9:.1f} GB into a live engine", fontsize=10)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axes.legend(handles, list(colors), fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    print(f"written: {file}")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    found = json.loads(source.read_text())
    show(found)
    plot(found, source.with_suffix(".png"))
