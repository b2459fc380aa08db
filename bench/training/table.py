"""The table and the picture of bench/trainer.py, and whether its rows computed the same thing."""

from pathlib import Path
from typing import Any

LOSS_TOLERANCE = 2e-4
"""Relative tolerance of a mean over a sequence. Every token's logits are rounded to bfloat16 (2^-9); the errors are
independent, and 1,024 of them average out to a thirty-second."""


def print_table(report: dict[str, Any]) -> None:
    heads = ("tok/s", "step s", "MFU", "roofline", "peak GB", "Mtok/$", "loss")
    print(f"\n{'row':16}{'tokens':>8}" + "".join(f"{head:>10}" for head in heads))
    for name, row in report["rows"].items():
        if "not_run" in row:
            print(f"{name:16}  not run: {row['not_run']}")
        for num_tokens, cell in row.get("lengths", {}).items():
            if "failed" in cell:
                print(f"{name:16}{num_tokens:>8}  {cell['failed']}")
                continue
            mfu = "-" if cell["mfu"] is None else f"{cell['mfu']:.1%}"
            peak = "-" if cell["peak_gb"] is None else f"{cell['peak_gb']:.1f}"
            cells = (
                f"{cell['tokens_per_s']:.0f}",
                f"{cell['step_s']:.3f}",
                mfu,
                f"{cell['of_roofline']:.1%}",
                peak,
                f"{cell['tokens_per_dollar'] / 1e6:.2f}",
                f"{cell['first_loss']:.4f}",
            )
            print(f"{name:16}{num_tokens:>8}" + "".join(f"{one:>10}" for one in cells))
        kernels = row.get("kernels", [])
        for kind in sorted({kernel["kind"] for kernel in kernels}):
            mine = [kernel for kernel in kernels if kernel["kind"] == kind]
            print(f"    {sum(k['ms'] for k in mine):8.2f} ms {sum(k['calls'] for k in mine):>6} x  {kind}")
        for kernel in kernels[:25]:
            print(f"    {kernel['ms']:8.2f} ms {kernel['calls']:>6} x  {kernel['kernel'][:90]}")


def do_losses_agree(report: dict[str, Any]) -> bool:
    """Print every row's first loss, before any update, beside the first row's, at the first length."""
    lengths = {name: row["lengths"] for name, row in report["rows"].items() if row.get("lengths")}
    first = {name: next(iter(cells.values())).get("first_loss") for name, cells in lengths.items()}
    losses = {name: loss for name, loss in first.items() if loss is not None}
    if not losses:
        return True
    reference = next(iter(losses.values()))
    apart = {name: abs(loss / reference - 1) for name, loss in losses.items()}
    print("loss of the first step: " + ", ".join(f"{n} {losses[n]:.6f} ({apart[n]:.1e})" for n in losses))
    return max(apart.values()) <= LOSS_TOLERANCE


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot tokens per second and peak memory against length."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print(f"no matplotlib here: python bench/trainer.py --out JSON --plot {path.name} draws the picture elsewhere")
        return

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, row in report["rows"].items():
        cells = {int(k): v for k, v in row.get("lengths", {}).items() if "failed" not in v}
        style = "o-" if name.startswith("ours") else "s--"
        axes[0].plot(list(cells), [c["tokens_per_s"] for c in cells.values()], style, label=name)
        if all(c["peak_gb"] is not None for c in cells.values()):
            axes[1].plot(list(cells), [c["peak_gb"] for c in cells.values()], style, label=name)
    for axis, title in zip(axes, ("tokens per second", "peak memory, GB"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in the sequence")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")
