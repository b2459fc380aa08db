"""A ParityReport as words on the screen, as JSON and as a picture.

Owns: presentation. Does not own: any number in it (measure.py, compare.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.files.outputs import save_picture, write_output

if TYPE_CHECKING:
    from slipstream.orchestrator.parity.measure import ParityReport

FLOOR = "engine, engine prefill"
WIDTH = 116
"""Columns of the tables; figures that are cut off are of no use."""


def write_files(report: ParityReport, folder: Path) -> tuple[Path, Path]:
    """Write parity.json and parity.png. Returns their paths.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    figures, picture = folder / "parity.json", folder / "parity.png"
    try:
        write_output(figures, json.dumps(asdict(report), indent=2) + "\n")
        _draw(report, picture)
    except OSError as error:
        raise ConfigError(f"--output={folder} cannot be written: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"this environment lacks {error.name}, which draws parity.png; run `make setup`") from error
    return figures, picture


def print_report(report: ParityReport) -> None:
    """Tables, then the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=WIDTH)
    with console.capture() as captured:
        for title, columns, rows in _tables(report):
            table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
            for number, column in enumerate(columns):
                table.add_column(column, justify="right" if number else "left", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            console.print(table)
            console.print()
    sys.stdout.write(f"{captured.get()}{report.sentence}\n")  # the verdict, whole: a console would fold it


def _tables(report: ParityReport) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    from slipstream.orchestrator.parity.compare import grouped  # with torch, which --help does not need

    floor = report.matrix[FLOOR]["k3_mean"]
    rows = [
        (
            "engine, its own prefill (the floor)" if pair == FLOOR else pair,
            f"{figures['k3_mean']:.2e}",
            f"{figures['k3_mean'] / floor:.2g}" if floor else "-",
            f"{figures['k3_p99']:.1e}",
            f"{figures['max_abs_log_ratio']:.1e}",
            f"{figures['probability_difference']:.1e}",
        )
        for pair, figures in report.matrix.items()
    ]
    title = (
        f"{report.model}, {report.dtype}, {report.device}: {report.num_prompts} x {report.max_tokens} sampled tokens, "
        f"entropy {report.entropy:.2f} nats"
    )
    yield title, ("sampler, other", "k3", "x floor", "p99", "max |d|", "|dp|"), rows
    kinds = grouped(report.differences, lambda found: found.kind)
    worst = [(kind, max(members, key=lambda found: found.excess)) for kind, members in kinds.items()]
    yield (
        "Each operation alone, on the engine's inputs (its worst layer)",
        ("operation", "layer", "relative", "elements that differ", "flipped", "beyond rounding"),
        [
            (
                kind,
                "" if found.layer is None else str(found.layer),
                f"{found.relative:.1e}",
                f"{found.differing:.1%}",
                f"{found.flipped:.1%}" if kind.endswith("gate") else "",
                f"{found.excess:.1f} x" if found.excess > 1 else "no",
            )
            for kind, found in worst
        ],
    )
    flipped = "" if report.flipped is None else f"; {report.flipped:.1%} of routings are others"
    start, swaps = report.swaps[0], report.swaps[1:]
    nearest = sorted(swaps[2:], key=lambda swap: swap.k3_mean)[:4]
    yield (
        f"k3 over the recorded sequences with one block's output from the engine{flipped}",
        ("block", "k3"),
        [
            ("none", f"{start.k3_mean:.2e}"),
            *((f"{swap.block}, all layers", f"{swap.k3_mean:.2e}") for swap in swaps[:2]),
            *((swap.block, f"{swap.k3_mean:.2e}") for swap in nearest),
        ],
    )


def _draw(report: ParityReport, picture: Path) -> None:
    """Left: how far every operation is off by layer, alone, and the stream. Right: k3 with one block of the engine."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(14, 6), layout="constrained")
    alone, swapped = figure.subplots(1, 2)
    kinds: dict[str, dict[int, float]] = {}
    for found in report.differences:
        if found.layer is not None:
            layers = kinds.setdefault(found.kind, {})
            layers[found.layer] = max(found.relative, layers.get(found.layer, 0.0))
    for kind, layers in kinds.items():
        if any(layers.values()):
            alone.plot(list(layers), list(layers.values()), marker="o", markersize=3, linewidth=1.2, label=kind)
    streams = {int(name.split(".")[1]): value for name, value in report.chained.items()}
    alone.plot(list(streams), list(streams.values()), "k--", linewidth=1.2, label="residual stream, the whole way")
    alone.set_title("difference from the engine, relative: each operation alone", fontsize=10)
    floor = report.matrix[FLOOR]["k3_mean"]
    for kind in ("self_attn", "mlp"):
        points = {
            int(swap.block.split(".")[1]): swap.k3_mean
            for swap in report.swaps
            if swap.block.startswith("layers.") and swap.block.endswith(kind)
        }
        swapped.plot(list(points), list(points.values()), marker="o", markersize=3, label=f"{kind} from the engine")
    swapped.axhline(report.swaps[0].k3_mean, color="k", linestyle="--", linewidth=1, label="nothing swapped")
    if floor:
        swapped.axhline(floor, color="grey", linestyle=":", linewidth=1, label="the engine against its own prefill")
    swapped.set_title("k3 with one block taken from the engine", fontsize=10)
    for panel in (alone, swapped):
        values = [value for line in panel.lines for value in line.get_ydata()]
        panel.set_yscale("symlog", linthresh=min((value for value in values if value > 0), default=1.0))
        panel.set_xlabel("layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(report.sentence, fontsize=9, wrap=True)
    save_picture(figure, picture)
