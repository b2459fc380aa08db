"""The picture at the end of a run: curves.png, drawn from metrics.jsonl alone.

Owns: which curves are shown. Does not own: the numbers.
"""

from pathlib import Path
from typing import Any

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import Objective
from slipstream.orchestrator.files.outputs import save_picture
from slipstream.orchestrator.files.row_files import read_figures
from slipstream.trainer.step.mismatch_bins import POSITION_STARTS

Panels = tuple[tuple[str, tuple[str, ...], str], ...]
"""(title, metrics, scale of the vertical axis) of each picture."""

RL_PANELS: Panels = (
    ("reward", ("reward/mean", "eval/reward"), "linear"),
    ("mismatch KL (k3)", ("parity/k3", "parity/floor_k3", "parity/k3_p99", "parity/k3_stale"), "log"),
    ("k3 by position in the response", tuple(f"parity/k3_from_{start}" for start in POSITION_STARTS), "log"),
    ("entropy and KL to the teacher, nats", ("policy/entropy", "distill/kl_mean"), "linear"),
    (
        "importance weights",
        ("correction/ess_fraction", "correction/truncated_fraction", "correction/masked_fraction"),
        "linear",
    ),
    ("gradient norm", ("optim/grad_norm",), "log"),
    ("weight sync, s", ("sync/total_s", "sync/pause_s"), "linear"),
    ("step, s", ("step/total_s", "rollout/wait_s", "trainer/forward_backward_s"), "linear"),
)


TAUGHT_PANELS: Panels = (
    ("gradient norm", ("optim/grad_norm",), "log"),
    ("learning rate", ("optim/lr",), "linear"),
    ("tokens per second per rank", ("trainer/tokens_per_s_per_rank",), "linear"),
    ("step, s", ("step/total_s", "trainer/forward_backward_s", "trainer/optimizer_s"), "linear"),
)
SFT_PANELS: Panels = (
    ("negative log-likelihood, nats", ("sft/nll", "eval/nll"), "linear"),
    ("entropy, nats", ("policy/entropy",), "linear"),
    *TAUGHT_PANELS,
)
DPO_PANELS: Panels = (
    ("loss of a pair", ("dpo/loss", "eval/dpo_loss"), "linear"),
    ("pairs in the right order", ("dpo/accuracy", "eval/dpo_accuracy"), "linear"),
    ("rewards", ("dpo/chosen_reward", "dpo/rejected_reward", "dpo/margin_mean"), "linear"),
    ("entropy, nats", ("policy/entropy",), "linear"),
    *TAUGHT_PANELS,
)
PANELS: dict[Objective, Panels] = {Objective.policy: RL_PANELS, Objective.sft: SFT_PANELS, Objective.dpo: DPO_PANELS}


def _step_of(row: JsonObject, name: str) -> int:
    # An evaluation beside training is of an earlier step than its row.
    step = row.get("eval/step") if name.startswith("eval/") else None
    return row["step"] if step is None else step


_MARGINS = {"left": 0.035, "right": 0.99, "bottom": 0.07, "top": 0.95, "wspace": 0.2, "hspace": 0.3}
"""Where the panels lie, as shares of the picture. If matplotlib looks for that itself, a run ends a second later."""


def draw_curves(metrics: Path, picture: Path, panels: Panels = RL_PANELS) -> None:
    """Write one PNG with two rows of panels. A metric with no number in any row gets no line."""
    from matplotlib.figure import Figure

    shown = {name for _, names, _ in panels for name in names}
    rows = read_figures(metrics, {"eval/step", *shown})
    figure: Any = Figure(figsize=(14 * len(panels) / 6, 7))
    figure.subplots_adjust(**_MARGINS)
    for panel, (title, names, scale) in zip(figure.subplots(2, len(panels) // 2).flat, panels, strict=True):
        for name in names:
            points = [(_step_of(row, name), row[name]) for row in rows if row.get(name) is not None]
            if points:
                is_sparse = len(points) < len(rows) / 2
                panel.plot(*zip(*points, strict=True), label=name, marker="o" if is_sparse else "", linewidth=1.3)
        if panel.lines:
            panel.legend(fontsize=8)
            is_positive = all(value > 0 for line in panel.lines for value in line.get_ydata())
            panel.set_yscale(scale if is_positive else "linear")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    save_picture(figure, picture)
