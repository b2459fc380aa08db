"""A run as a RayJob of KubeRay (https://docs.ray.io/en/latest/cluster/kubernetes).

    kubectl apply --> ConfigMap: run.sh     RayJob: a head and N - 1 workers, alike --> bash /launch/run.sh on the head

When a machine is lost, KubeRay makes another cluster (backoffLimit) and run.sh goes on from the newest checkpoint.

Owns: the two objects. Does not own: the commands that start a run (script.py). Pure.
"""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.launch.launch_options import DEFAULT_IMAGE, LaunchOptions
from orchestrator.launch.script import GRACE_S, Job, start_lines
from orchestrator.launch.yaml_text import documents

RETRIES = 3
RAY_VERSION = "2.60.0"
"""Of the environment that Slipstream is locked to."""
_SCRIPT = "/launch"


def render(job: Job, options: LaunchOptions) -> str:
    """Both objects, for `kubectl apply -f FILE`."""
    return documents([config_map(job, options), ray_job(job, options)])


def config_map(job: Job, options: LaunchOptions) -> dict[str, Any]:
    """The script that the job runs on its head."""
    lines = [
        "set -euo pipefail",
        *start_lines(job, name=shlex.quote(job.name), on_cluster=True),
        'exec slipstream "$@"',
    ]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, options),
        "data": {"run.sh": "\n".join(lines) + "\n"},
    }


def ray_job(job: Job, options: LaunchOptions) -> dict[str, Any]:
    """The job."""
    pod = {"template": _pod(job, options)}
    workers = {"groupName": "workers", "replicas": job.shape.nodes - 1, "minReplicas": job.shape.nodes - 1}
    workers |= {"maxReplicas": job.shape.nodes - 1, "rayStartParams": {}, **pod}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job, options),
        "spec": {
            "entrypoint": f"bash {_SCRIPT}/run.sh",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": RETRIES,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {}, **pod},
                "workerGroupSpecs": [workers] if job.has_several_nodes else [],
            },
        },
    }


def _metadata(job: Job, options: LaunchOptions) -> dict[str, Any]:
    return {"name": job.name} | ({"namespace": options.namespace} if options.namespace else {})


def _pod(job: Job, options: LaunchOptions) -> dict[str, Any]:
    gpus = job.shape.gpus
    size = {
        "cpu": str(options.cpus_per_gpu * gpus if gpus else job.shape.processes),
        "memory": f"{options.memory_gib_per_gpu * max(gpus, 1)}Gi",
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
    }
    # Ray's object store and NCCL are in /dev/shm, of which a container has 64 MB.
    volumes: list[dict[str, Any]] = [
        {"name": "launch", "configMap": {"name": job.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "launch", "mountPath": _SCRIPT}, {"name": "shm", "mountPath": "/dev/shm"}]
    if options.volume:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": options.volume}})
        mounts.append({"name": "shared", "mountPath": str(options.mount)})
    container = {
        "name": "ray",
        "image": options.image or DEFAULT_IMAGE,
        "resources": {"requests": size, "limits": size},
        "env": [{"name": "RAY_worker_niceness", "value": "0"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "volumeMounts": mounts,
    }
    selector = {"nodeSelector": {"nvidia.com/gpu.product": options.gpu_type}} if options.gpu_type else {}
    return {
        "spec": {
            **selector,
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": GRACE_S,
        }
    }
