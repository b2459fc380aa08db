"""How well trainer, engine and transformers agree about sampled tokens, on layers of real width.

    python bench/parity.py                           all rows, on one GPU, as many at a time as fit it
    python bench/parity.py --only qwen3-30b-a3b-12
    python bench/parity.py --tiny                    two small layers of each, a CPU will do

Each row is a process of its own: vLLM (eager, or compiled with CUDA graphs as in a run) draws random bfloat16 weights
by name, samples at temperature 1 and prefills what it sampled (the floor); then transformers and the trainer draw the
same weights and score the same tokens, the trainer once for each switch, and its operations are compared with an eager
engine's one by one. The rows are in
bench/parity_shapes.py. Writes bench/results/parity-<device>.json, row by row.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.environment import RESULTS, command_line, environment, write_report  # noqa: E402
from bench.parity_row import run_row  # noqa: E402
from bench.parity_shapes import ROWS  # noqa: E402

SPARE_GIB = 8
"""Part of the GPU's memory for contexts of processes and for what others have."""
COLUMNS = ("engine prefill", "transformers", "trainer", "transformers, trainer", "transformers, float32")


class Memory:
    """GPU memory that rows take turns with."""

    def __init__(self, gib: int) -> None:
        self._free, self._changed = gib, threading.Condition()

    def take(self, gib: int) -> None:
        """Wait until so much is free, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib

    def give_back(self, gib: int) -> None:
        """Free it again."""
        with self._changed:
            self._free += gib
            self._changed.notify_all()


def print_table(report: dict[str, Any]) -> None:
    """k3 (largest |d|) of each cell, and the switches below."""
    print(f"\n{'row':<22}{'nats':>6}  " + "".join(f"{column:>30}" for column in COLUMNS))
    for name, row in report["rows"].items():
        matrix = row.get("matrix", {})
        cells = [_cell(matrix.get(column)) for column in COLUMNS]
        print(f"{name:<22}{row.get('entropy', float('nan')):>6.2f}  " + "".join(f"{cell:>30}" for cell in cells))
        for label, figures in matrix.items():
            if label not in COLUMNS:
                ratio = figures["k3_mean"] / (matrix["engine prefill"]["k3_mean"] or float("nan"))
                print(f"{'':<8}{label:<84}{_cell(figures):>18}   {ratio:.2f} x the floor")
        for trouble in ("failed", "routes_failed", "transformers_failed", "failed_switches", "sentence"):
            if trouble in row:
                print(f"{'':<30}{trouble}: {row[trouble]}")


def _cell(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['k3_mean']:.2e}, {figures['max_abs_log_ratio']:.2g}"


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--jobs", type=int, default=3, help="rows that run side by side")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="when rows are ended; what they have is kept")
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.jobs = 1
    return args


def main() -> None:
    """Run the rows, each in a process of its own, and keep what each has."""
    args = parse()
    if args.row is not None:
        args.device = os.environ["PARITY_DEVICE"]
        run_row(args.row, args, args.out)
        os._exit(0)  # not after an exception: torch's and vLLM's threads may keep the process
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = "gpu" if device == "cuda" else "cpu"
    out: Path = args.out or RESULTS / f"parity-{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(args.commit), "tiny": args.tiny, "rows": {}}
    print(json.dumps(report["environment"]), flush=True)
    total_gib = torch.cuda.mem_get_info()[1] // 2**30 - SPARE_GIB if device == "cuda" else 1000
    memory, lock, ends_at = Memory(total_gib), threading.Lock(), time.monotonic() + args.limit_s

    def run(name: str) -> None:
        part, gib = out.with_suffix(f".{name}.part"), min(ROWS[name].gib, total_gib)
        memory.take(gib)
        words = ["--row", name, "--out", str(part), *(["--tiny"] if args.tiny else [])]
        seen = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PARITY_DEVICE": device}
        with out.with_suffix(f".{name}.log").open("w") as log:
            command = [sys.executable, __file__, *words]
            process = subprocess.Popen(command, env=seen, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(max(1.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its engine ends with it
                code = process.wait()
        memory.give_back(gib)
        with lock:
            row: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"row": name}
            report["rows"][name] = row | ({"failed": f"exit code {code}"} if code else {})
            part.unlink(missing_ok=True)
            write_report(out, report)
            print(f"{name}: {'failed, ' if code else ''}{row.get('seconds')}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, args.only))
    report["rows"] = {name: report["rows"][name] for name in args.only}
    write_report(out, report)
    print_table(report)
    print(f"written: {out}")
    if any("failed" in row for row in report["rows"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
