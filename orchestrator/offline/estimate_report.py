"""A PlanReport as words on the screen, as JSON, and as a picture.

Owns: presentation. Does not own: any number in it (estimate.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.conf.schema import SyncMode
from slipstream.orchestrator.files.outputs import save_picture

if TYPE_CHECKING:
    from slipstream.orchestrator.offline.modes import ModeChoice
    from slipstream.orchestrator.offline.plan_report import (
        DeltaChoice,
        HostMemory,
        PlanReport,
        RelayChoice,
        RemoteMergeChoice,
        RolloutMemory,
    )
    from slipstream.weight_sync.plan.transfer_plan import PlanSummary

MAX_ROWS = 40
"""Ranks that a picture shows of each side: the first ones; --json has them all."""
_COLOURS = {"prepare": "#E69F00", "write": "#0072B2", "receive": "#56B4E9", "verify": "#009E73"}


def as_plain(report: PlanReport) -> JsonObject:
    """The report for programs; seconds and bytes."""
    summary, prediction, trainer = report.summary, report.prediction, report.config.trainer
    rollout, sync = report.config.rollout, report.config.weight_sync
    return {
        "model": asdict(report.model),
        "cluster": {
            "device": report.config.cluster.device.value,
            "trainer_ranks": trainer.num_ranks,
            "ep_size": trainer.ep_size,
            "engines": rollout.most_workers,
            "tp_size": rollout.tp_size,
            "enable_expert_parallel": rollout.enable_expert_parallel,
            "ranks_per_node": report.hardware.ranks_per_node,
            "nodes": report.placement.num_nodes,
        },
        "rates": asdict(report.hardware.rates),
        "faults": {"slow_ranks": {str(rank): factor for rank, factor in report.hardware.slow_ranks.items()}},
        "plan": {
            "digest": summary.digest,
            "tasks": summary.num_tasks,
            "bytes": summary.num_bytes,
            "group_bytes": summary.group_bytes,
            "largest_task_bytes": summary.largest_task_bytes,
            "sent_bytes": list(summary.sent_bytes.values()),
            "received_bytes": {f"{r}/{rank}": size for (r, rank), size in summary.received_bytes.items()},
            "send_balance": summary.send_balance,
            "receive_balance": summary.receive_balance,
        },
        "memory_estimate": {
            "trainer_gpu": {
                **asdict(report.trainer),
                "whole_from_device_bytes": report.trainer.least_device_bytes,
                "publish": prediction.peak_bytes,
                "watermark": sync.watermark_bytes,
                "formula": report.trainer.FORMULA,
                "not_included": "activations, gathered layers, the allocator's slack",
            },
            "rollout_gpu": {
                **asdict(report.rollout),
                "formula": report.rollout.formula,
                "not_included": "KV cache, activations, CUDA graphs",
            },
            "hosts": {**asdict(report.host), "not_included": "the processes themselves"},
        },
        "predicted_s": {
            "begin": prediction.begin_s,
            "prepare": prediction.prepare_s,
            "write": prediction.write_s,
            "last_byte": prediction.write_end_s,
            "barrier": prediction.barrier_s,
            "verify": prediction.verify_s,
            "commit": prediction.commit_s,
            "total": prediction.total_s,
            "total_by_nic_gb_s": {f"{rate / 1e9:g}": seconds for rate, seconds in report.total_s_by_nic.items()},
            "sender_floor": prediction.sender_floor_s,
            "receiver_floor": prediction.receiver_floor_s,
        },
        "relay": None if report.relay is None else {**asdict(report.relay), "total_s": report.relay.total_s},
        "delta": None if report.delta is None else asdict(report.delta),
        "remote_merge": None if report.remote_merge is None else asdict(report.remote_merge),
        "modes": {**asdict(report.modes), "break_even_s": report.modes.break_even_s},
    }


def print_report(report: PlanReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    with console.capture() as captured:  # rich would end the process by itself where a reader has gone (| head)
        for title, rows in _sections(report):
            table = Table(
                title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
            )
            table.add_column(no_wrap=True)
            table.add_column(justify="right", no_wrap=True)
            table.add_column(style="dim", overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            console.print()
    sys.stdout.write(captured.get())


def write_picture(report: PlanReport, folder: Path) -> Path:
    """Write timeline.png. Returns its path; a ConfigError where it cannot be written, or matplotlib is missing."""
    picture = folder / "timeline.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _draw(report, picture)
    except OSError as error:
        raise ConfigError(f"--output={folder} cannot be written: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"this environment lacks {error.name}, which draws timeline.png; run `make setup`") from error
    return picture


_Row = tuple[str, str, str]


def _sections(report: PlanReport) -> Iterator[tuple[str, list[_Row]]]:
    rates = report.hardware.rates
    nic, nvlink, hbm = (f"{rate / 1e9:g}" for rate in (rates.nic_bytes_s, rates.nvlink_bytes_s, rates.hbm_bytes_s))
    yield "Run", _run_rows(report)
    yield f"Publish (plan {report.summary.digest[:12]})", _bytes_rows(report.summary)
    yield "Memory of a trainer GPU, estimated (without activations and gathered layers)", _trainer_rows(report)
    left_out = "without KV cache, activations and CUDA graphs"
    yield f"Memory of a rollout GPU, estimated ({left_out})", _engine_rows(report.rollout)
    if rows := _host_rows(report.host):
        yield "Memory of hosts, estimated (without the processes themselves)", rows
    yield f"Predicted publish (NIC {nic}, NVLink {nvlink}, HBM {hbm} GB/s)", _time_rows(report)
    if report.relay is not None:
        yield "The same with weight_sync.relay=node", _relay_rows(report.relay, report)
    if report.delta is not None:
        yield "The same with what changed alone (weight_sync.delta_bytes)", _delta_rows(report.delta, report.summary)
    if report.remote_merge is not None:
        rows = _remote_merge_rows(report.remote_merge, report.summary)
        yield "The same with engines that merge for themselves (weight_sync.remote_merge)", rows
    yield "Which mode", _mode_rows(report.modes)


def _run_rows(report: PlanReport) -> list[_Row]:
    model, trainer, rollout = report.model, report.config.trainer, report.config.rollout
    experts = f", {model.num_experts} experts (top-{model.top_k})" if model.num_experts else ""
    ep = ", experts split" if rollout.enable_expert_parallel else ""
    least = f", at least {rollout.least_workers}" if rollout.is_range else ""
    slow = [f"trainer rank {rank} is {times:g} times slower" for rank, times in report.hardware.slow_ranks.items()]
    return [
        ("parameters", _millions(model.num_parameters), f"{model.family}: {model.num_layers} layers{experts}"),
        ("checkpoint", _gb(model.num_bytes), model.dtype),
        ("trainer", counted(trainer.num_ranks, "rank"), f"ep_size {trainer.ep_size}, mode {trainer.mode.value}"),
        ("rollout", counted(rollout.most_workers, "engine"), f"tp_size {rollout.tp_size}{ep}{least}"),
        ("nodes", str(report.placement.num_nodes), f"{report.hardware.ranks_per_node} GPUs each, trainer first"),
        *([("faults", str(len(slow)), ", ".join(slow))] if slow else []),
    ]


def _bytes_rows(summary: PlanSummary) -> list[_Row]:
    sent, received = list(summary.sent_bytes.values()), list(summary.received_bytes.values())
    groups = ", ".join(f"{name} {_gb(size)}" for name, size in summary.group_bytes.items())
    return [
        ("bytes", _gb(summary.num_bytes), groups),
        ("tasks", str(summary.num_tasks), f"the largest {_gb(summary.largest_task_bytes)}"),
        ("a sender", _gb(sum(sent) / len(sent)), _spread(sent, summary.send_balance)),
        ("a receiver", _gb(sum(received) / len(received)), _spread(received, summary.receive_balance)),
    ]


def _trainer_rows(report: PlanReport) -> list[_Row]:
    memory, staging, peak = report.trainer, report.staging, report.prediction.peak_bytes
    slots = "two slots, changes as large as a third," if staging.has_changes else "two slots"
    held = f"{slots} and {_gb(staging.reserved_bytes)} more, of a watermark of {_gb(staging.watermark_bytes)}"
    on_host = f"its moments: {_gb(memory.host_moments)} of host memory"
    whole = f"more, whole, on GPUs of at least {_gb(memory.least_device_bytes)}; on others gathered layer by layer"
    return [
        ("weights", _gb(memory.weights), ""),
        ("adapters", _gb(memory.adapters), ""),
        ("gradients", _gb(memory.gradients), ""),
        ("optimizer", _gb(memory.optimizer), on_host if memory.host_moments else ""),
        *([("reference", _gb(memory.reference), "what training starts from")] if memory.reference else []),
        ("a publish", _gb(peak), held),
        ("together", _gb(memory.total + peak), memory.FORMULA),
        *([("dense weights", _gb(memory.whole), whole)] if memory.whole else []),
    ]


def _engine_rows(memory: RolloutMemory) -> list[_Row]:
    if not memory.num_slots:
        return [("weights", _gb(memory.weights), memory.formula)]
    return [
        ("weights", _gb(memory.weights), ""),
        ("adapter slots", _gb(memory.slots), f"{memory.num_slots} of them"),
        ("together", _gb(memory.weights + memory.slots), memory.formula),
    ]


def _host_rows(memory: HostMemory) -> list[_Row]:
    copies = f"{memory.num_copies} copies of its parameters and moments, in case a rank dies"
    most = f"with evaluations at most {_gb(memory.most_responses)}"
    kept = f"its newest responses, in case the controller is killed; {most}"
    return [
        *([("a trainer rank", _gb(memory.trainer_states), copies)] if memory.num_copies else []),
        *([("a rollout worker", _gb(memory.responses), kept)] if memory.most_responses else []),
    ]


def _time_rows(report: PlanReport) -> list[_Row]:
    prediction, is_adapter = report.prediction, report.config.weight_sync.mode is SyncMode.adapter
    side = "receivers" if prediction.receiver_floor_s >= prediction.sender_floor_s else "senders"
    share = prediction.floor_s / prediction.total_s
    return [
        ("begin", _s(prediction.begin_s), "" if is_adapter else "pause the engines"),
        ("prepare", _s(prediction.prepare_s), "busiest rank: pack, merge, hash; overlaps with write"),
        ("write", _s(prediction.write_s), "busiest rank"),
        ("last byte", _s(prediction.write_end_s), "after the start"),
        ("barrier", _s(prediction.barrier_s), ""),
        ("verify", _s(prediction.verify_s), "hash what arrived"),
        ("commit", _s(prediction.commit_s), "requests that follow use it" if is_adapter else "resume the engines"),
        ("total", _s(prediction.total_s), f"the wire alone: {_s(prediction.floor_s)} ({side}; {share:.0%} of it)"),
        *(
            (f"at {rate / 1e9:g} GB/s", _s(seconds), "total, if a NIC delivers no more than that")
            for rate, seconds in list(report.total_s_by_nic.items())[1:]
        ),
    ]


def _delta_rows(delta: DeltaChoice, summary: PlanSummary) -> list[_Row]:
    kept = ("trainer GPU", _gb(delta.kept_bytes), "more memory: the adapters as published last")
    if delta.host_bytes:
        kept = ("trainer host", _gb(delta.host_bytes), "more memory of a rank: its part as published last")
    return [
        ("changed", f"{delta.changed:.2%}", "of all elements, assumed: sync/changed_fraction of a run says it"),
        ("bytes", _gb(delta.num_bytes), f"instead of {_gb(summary.num_bytes)}"),
        ("total", _s(delta.total_s), "to engines that hold the version before; finding what changed included"),
        kept,
        ("rollout GPU", _gb(delta.zone_bytes), "more memory: what changed, before it is put in"),
    ]


def _remote_merge_rows(merge: RemoteMergeChoice, summary: PlanSummary) -> list[_Row]:
    place = "rollout host" if merge.is_on_host else "rollout GPU"
    return [
        ("bytes", _gb(merge.num_bytes), f"of A and B, instead of {_gb(summary.num_bytes)}"),
        ("total", _s(merge.total_s), "with the engines' merges; not measured on GPUs"),
        (place, _gb(merge.base_bytes), "more memory of a rank: the base of what is merged"),
    ]


def _relay_rows(relay: RelayChoice, report: PlanReport) -> list[_Row]:
    readers = counted(report.config.rollout.most_workers - relay.num_written, "engine")
    gain_s = report.prediction.total_s - relay.total_s
    verdict = f"{_s(abs(gain_s))} {'less' if gain_s > 0 else 'more'} than writing to every engine"
    return [
        ("written", counted(relay.num_written, "engine"), f"{readers} on their nodes read from them"),
        ("bytes", _gb(relay.num_bytes), f"sent by the trainer, instead of {_gb(report.summary.num_bytes)}"),
        ("write", _s(relay.written_s), "until those that are written have committed"),
        ("read", _s(relay.read_s), "over NVLink, rank from rank: pause, read, hash, resume"),
        ("total", _s(relay.total_s), verdict),
    ]


def _mode_rows(modes: ModeChoice) -> list[_Row]:
    merged = ("merged", "-", "not planned: weight_sync.mode=adapter")
    if modes.merged_s is not None:
        merged = ("merged", _s(modes.merged_s), f"{_gb(modes.merged_bytes)}; engines pause meanwhile")
    if modes.adapter_s is None:
        return [merged, ("adapter", "-", f"refused: {modes.no_adapter}")]
    cost = f"costs {modes.decode_loss:.0%} of decode speed" if modes.decode_loss else "no cost in decode speed is known"
    told = f"{_gb(modes.adapter_bytes)}; no pause; {_gb(modes.slot_bytes)} a slot on a rollout GPU; {cost}"
    if modes.break_even_s is None:
        return [merged, ("adapter", _s(modes.adapter_s), told)]
    if modes.break_even_s == float("inf"):
        wins = ("adapter wins", "", "it publishes sooner, and nothing is lost in between")
    elif modes.break_even_s > 0:
        why = f"when engines generate longer than {_s(modes.break_even_s)} between two publishes; else the adapter does"
        wins = ("merged wins", "", why)
    else:
        wins = ("merged wins", "", "the adapter is no sooner")
    return [merged, ("adapter", _s(modes.adapter_s), told), wins]


def _draw(report: PlanReport, picture: Path) -> None:
    """One row a rank: how long its ports, its memory and its hashes are busy, senders above receivers."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    prediction = report.prediction
    may_verify_s = prediction.write_end_s + prediction.barrier_s + prediction.messages_s
    rows: list[tuple[str, dict[str, tuple[float, float]]]] = []
    for one in prediction.senders[:MAX_ROWS]:
        bars = {"prepare": (one.prepare_start_s, one.prepare_s), "write": (one.write_start_s, one.write_s)}
        rows.append((f"trainer {one.rank}", bars))
    for one in prediction.receivers[:MAX_ROWS]:
        bars = {"receive": (prediction.write_start_s, one.receive_s), "verify": (may_verify_s, one.verify_s)}
        rows.append((f"engine {one.destination[0]} rank {one.destination[1]}", bars))
    figure: Any = Figure(figsize=(14, 2.0 + 0.32 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    for row, (_, bars) in enumerate(rows):
        for lane, (stage, bar) in enumerate(bars.items()):
            axes.broken_barh([bar], (row + 0.1 + lane * 0.4, 0.4), facecolors=_COLOURS[stage])
    axes.set_yticks([row + 0.5 for row in range(len(rows))], [label for label, _ in rows], fontsize=8)
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, prediction.total_s)
    axes.axvline(prediction.floor_s + prediction.begin_s, color="#D55E00", linestyle="--", linewidth=1)
    axes.set_xlabel("seconds after the start of the publish; dashed: the wire alone")
    hidden = len(prediction.senders) + len(prediction.receivers) - len(rows)
    more = f", {hidden} more ranks not shown" if hidden else ""
    axes.set_title(
        f"{report.model.family} {_millions(report.model.num_parameters)}: {_gb(report.summary.num_bytes)} in "
        f"{_s(prediction.total_s)} (predicted{more})",
        fontsize=11,
    )
    handles = [Patch(color=colour, label=stage) for stage, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    save_picture(figure, picture)


def _spread(sizes: list[int], balance: float) -> str:
    return f"{len(sizes)} of them: {_gb(min(sizes))} to {_gb(max(sizes))}, max/mean {balance:.3f}"


def _millions(number: int) -> str:
    """Parameters: a small model's are not 0.00 B, which reads as bytes."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _gb(num_bytes: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
