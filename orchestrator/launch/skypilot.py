"""A run as a task of SkyPilot (https://docs.skypilot.co).

    sky jobs launch --> on every machine: `run` --> the first: ray start --head, slipstream train | resume
                                                    the others: ray start --address, until that ends

A managed job (`sky jobs launch`) whose machines are taken away starts anew elsewhere, and goes on from the newest
checkpoint on the volume.

Owns: the task. Does not own: the commands that start a run (script.py). Pure.
"""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.launch.launch_options import DEFAULT_IMAGE, LaunchOptions
from orchestrator.launch.script import Job, start_lines, wait_for_nodes
from orchestrator.launch.yaml_text import documents

DEFAULT_GPU = "H100"
_PORT = 20_060
"""Of the run's Ray. SkyPilot's own has 6380."""


def render(job: Job, options: LaunchOptions) -> str:
    """The task, for `sky launch FILE`."""
    return documents([task(job, options)])


def task(job: Job, options: LaunchOptions) -> dict[str, Any]:
    """The task as plain values."""
    gpus = job.shape.gpus
    resources: dict[str, Any] = {"image_id": f"docker:{options.image or DEFAULT_IMAGE}"}
    if gpus:
        resources["accelerators"] = f"{options.gpu_type or DEFAULT_GPU}:{gpus}"
    resources["cpus"] = f"{options.cpus_per_gpu * gpus if gpus else job.shape.processes}+"
    resources["memory"] = f"{options.memory_gib_per_gpu * max(gpus, 1)}+"
    return {
        "name": job.name,
        "resources": resources,
        "num_nodes": job.shape.nodes,
        **({"volumes": {str(options.mount): options.volume}} if options.volume else {}),
        # Null: `sky` asks for its value. A file of the job must not hold it.
        **({"secrets": {"RAY_AUTH_TOKEN": None}} if job.has_several_nodes else {}),
        "run": "\n".join(_script(job)) + "\n",
    }


def _script(job: Job) -> list[str]:
    lines = ["set -euo pipefail"]
    if job.has_several_nodes:
        lines += [
            'RAY_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):' + f'{_PORT}"',
            "export RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0",
            'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
            "  # The first machine may take a while; this one ends when the first has ended.",
            '  until ray start --address="$RAY_ADDRESS"; do sleep 5; done',
            '  while ray health-check --address "$RAY_ADDRESS"; do sleep 10; done',
            "  exit 0",
            "fi",
            'ray start --head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS#*:}" --disable-usage-stats',
            "trap 'ray stop' EXIT",
            *wait_for_nodes(job.shape.nodes),
        ]
    lines += start_lines(job, name=shlex.quote(job.name), on_cluster=job.has_several_nodes)
    return [*lines, 'slipstream "$@"']
