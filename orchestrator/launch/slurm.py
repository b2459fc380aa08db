"""A run as a SLURM batch script.

    sbatch --> first machine: this script --> ray start --head, slipstream train | resume
                              srun --> each other machine: ray start --address

SLURM sends the script SIGUSR1 some minutes before the time limit: the run saves its state and ends, and the script puts
the job back into the queue. Preemption sends SIGTERM, and SLURM puts the job back itself. Either way it goes on from
the newest checkpoint, since run and job have the same number.

Owns: the script. Does not own: the commands that start a run (script.py). Pure.
"""

from __future__ import annotations

import shlex

from orchestrator.launch.launch_options import LaunchOptions
from orchestrator.launch.script import GRACE_S, Job, start_lines, wait_for_nodes


def render(job: Job, options: LaunchOptions) -> str:
    """The script, for `sbatch FILE`."""
    lines = [
        *_directives(job, options),
        "",
        "set -euo pipefail",
        f"export PATH={shlex.quote(str(options.venv / 'bin'))}:$PATH",
    ]
    if job.has_several_nodes:
        lines += _cluster(job)
    lines += ["", *start_lines(job, name=f'{shlex.quote(job.name)}-"$SLURM_JOB_ID"', on_cluster=job.has_several_nodes)]
    return "\n".join([*lines, *_RUN]) + "\n"


def _directives(job: Job, options: LaunchOptions) -> list[str]:
    gpus = job.shape.gpus
    cpus = options.cpus_per_gpu * gpus if gpus else job.shape.processes
    memory = f"{options.memory_gib_per_gpu * gpus}G" if gpus else "0"
    kind = f"{options.gpu_type}:" if options.gpu_type else ""
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.shape.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={kind}{gpus}"] if gpus else []),
        f"#SBATCH --cpus-per-task={cpus}",
        f"#SBATCH --mem={memory}",
        *([f"#SBATCH --time={options.time_limit}"] if options.time_limit else []),
        f"#SBATCH --signal=B:USR1@{GRACE_S}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
    ]


def _cluster(job: Job) -> list[str]:
    return [
        "",
        "# A Ray cluster of this job alone: a token of its own, a port by its number.",
        'RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | base64 | tr -dc "a-zA-Z0-9")',
        "export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0",
        """address=$(getent ahostsv4 "$(hostname)" | awk 'NR == 1 {print $1}')""",
        'export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 10000))"',
        'ray start --head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS#*:}" --disable-usage-stats',
        f'srun --nodes={job.shape.nodes - 1} --ntasks={job.shape.nodes - 1} --exclude="$SLURMD_NODENAME" \\',
        '    ray start --address="$RAY_ADDRESS" --block &',
        *wait_for_nodes(job.shape.nodes),
    ]


_RUN = [
    "",
    "run=",
    "is_told=false",
    "is_out_of_time=false",
    "# SIGTERM lets a run finish its step, save its state and end.",
    'end_run() { if [ -n "$run" ]; then kill -TERM "$run" || true; else is_told=true; fi; }',
    "trap 'is_out_of_time=true; end_run' USR1",
    "trap end_run TERM",
    'slipstream "$@" &',
    "run=$!",
    'if "$is_told"; then end_run; fi',
    'while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done  # a signal ends a wait, not the run',
    "code=0",
    'wait "$run" || code=$?  # of the run, which bash remembers',
    'if "$is_out_of_time" && [ "$code" = 143 ]; then',
    '  scontrol requeue "$SLURM_JOB_ID"',
    "fi",
    'exit "$code"',
]
