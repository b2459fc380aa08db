"""What the log-probabilities of one engine step cost its two processes: as vLLM sends them, and gathered.

    python bench/logprob_rows.py                   steps of 256 and 1,024 requests

The engine's process makes an output for each request and encodes the message; its client decodes it and gives each
request its log-probabilities (rollout/in_vllm/logprob_rows.py). Both by vLLM's own classes, one process after the
other, without sockets. "without" is the same message without log-probabilities. Prints the median of --repeats of each
and its environment; writes bench/results/logprob_rows-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.environment import environment  # noqa: E402
from slipstream.rollout.in_vllm.logprob_rows import gather, row_of_request, spread  # noqa: E402

T = TypeVar("T")


def median_ms(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median milliseconds of a call, after one of warm-up, and what it returned last."""
    times, result = [], call()
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), result


def measure(num_requests: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step in each process, by way."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    rng = np.random.default_rng(0)
    step = LogprobsLists(
        rng.integers(0, 150_000, (num_requests, 1), dtype=np.int32),
        rng.standard_normal((num_requests, 1), dtype=np.float32),
        rng.integers(0, 1000, num_requests, dtype=np.int32),
    )
    ways: dict[str, Callable[[int], Any]] = {
        "vllm": lambda request: step.slice_request(request, 1),
        "gathered": lambda request: row_of_request(step, request, 1),
        "without": lambda request: None,
    }
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    found = {}
    for way, logprobs_of in ways.items():

        def send(logprobs_of: Callable[[int], Any] = logprobs_of, way: str = way) -> Any:
            outputs = [
                EngineCoreOutput(request_id=f"rollout-{i}", new_token_ids=[i], new_logprobs=logprobs_of(i))
                for i in range(num_requests)
            ]
            if way == "gathered":
                gather(outputs)
            return encoder.encode(EngineCoreOutputs(outputs=outputs))

        engine_ms, message = median_ms(send, repeats)

        def receive(message: Any = message) -> None:
            spread(decoder.decode(message).outputs)

        client_ms, _ = median_ms(receive, repeats)
        found[way] = {"engine_ms": engine_ms, "client_ms": client_ms}
        print(f"{num_requests} requests, {way}: engine {engine_ms:.2f} ms, client {client_ms:.2f} ms", flush=True)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "logprob_rows-cpu.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(args.commit)}
    print(json.dumps(report["environment"]))
    report["steps"] = {num: measure(num, args.repeats) for num in args.requests}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
