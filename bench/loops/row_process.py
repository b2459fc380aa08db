"""A row of bench/loop.py that has a process of its own: what it is asked for, and how it answers.

The parent starts `python -m MODULE JOB`; the child prints its figures as one line, or why it has none.
"""

import json
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "result: "
"""How the line begins in which a child prints its figures."""


@dataclass(frozen=True, kw_only=True)
class Job:
    model: str
    """Folder with config.json."""
    device: str
    """cuda, or cpu for a small model in float32."""
    responses: int
    """Responses of a step."""
    group: int
    prompt_tokens: int
    length: int
    """Tokens of the longest response."""
    lengths: str
    """fixed or long-tailed."""
    max_model_len: int
    steps: int
    """Steps; of a bare engine: waves of requests."""
    warm_up: int
    microbatch_tokens: int
    rank: int
    lr: float
    kv_cache_bytes: int | None
    """None: what the engine finds free."""
    server_gpu: str = "1"
    """The GPU of a peer's vLLM server, where that is a process of its own."""
    concurrency: Sequence[int] = ()
    """Requests at once of a bare engine, one figure each."""
    sleeps: bool = False
    """The engine gives its memory back while the trainer works."""
    has_server: bool = False
    """The engine is a server on GPU 1."""
    is_async: bool = False
    """The engine samples ahead, on GPU 1."""
    staleness: int = 0
    """How many batches ahead."""
    num_gpus: int = 1
    gpu_memory_utilization: float = 0.85
    """What rollout.gpu_memory_utilization is of a run, of a bare engine."""
    peer_seconds: float = float("inf")
    """After so many a peer is ended, and told by the steps that it has made; TRL at the end of a step."""


def answer(run: Callable[[Job], dict[str, Any]]) -> None:
    """The child: run the job that is the only argument, and print its figures."""
    try:
        found = run(Job(**json.loads(sys.argv[1])))
    except Exception as error:  # noqa: BLE001 - whatever a peer fails with goes into the table
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        found = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    print(RESULT + json.dumps(found), flush=True)


def measure(module: str, job: Job, variables: Mapping[str, str]) -> dict[str, Any]:
    """The parent: run the job in a child, and return its figures and the GPUs'."""
    found: dict[str, Any] = {}
    command = [sys.executable, "-m", module, json.dumps(asdict(job))]
    with sampled_gpus() as gpus:
        process = subprocess.Popen(command, cwd=ROOT, env=dict(variables), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT):
                found = json.loads(line.removeprefix(RESULT))
            else:
                print(line, end="", flush=True)
        process.wait()
    return (found | {"gpus": gpus}) if found else {"failed": f"exit code {process.returncode}"}


def python_path(*first: Path) -> str:
    """For processes of this tree."""
    return os.pathsep.join(filter(None, [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH")]))


@contextmanager
def sampled_gpus() -> Iterator[dict[str, Any]]:
    """Busy share (percent) and most memory (MiB) of each GPU during the block, in the dictionary that it yields."""
    found: dict[str, Any] = {}
    query = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-l", "1"]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        process.terminate()
        found |= busy_and_memory(process.communicate()[0].splitlines())


def busy_and_memory(lines: Sequence[str]) -> dict[str, Any]:
    """From nvidia-smi's lines "index, busy, MiB", by index: the mean of the later half's busy, and the most memory."""
    told = [line.split(", ") for line in lines]
    samples = [(one[0], float(one[1]), float(one[2])) for one in told if len(one) == 3]
    found = {}
    for index in sorted({sample[0] for sample in samples}):
        mine = [sample for sample in samples if sample[0] == index]
        late = mine[len(mine) // 2 :]  # the start-up is not meant
        found[index] = {"busy": statistics.mean(one[1] for one in late), "mib": max(one[2] for one in mine)}
    return found
