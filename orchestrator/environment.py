"""Environment variables of every process of a run, in one place, each with its reason.

Owns: what libraries must be told through the environment, as they offer no other way. Does not own: options (conf/),
nor what the wrapper of one library sets in its own process for what it is about to load (rollout.engine,
weight_sync.transport.mooncake: they know the engine and the link).
Invariant: applied by `orchestrator.cli.main` before Ray starts, so that every process of the run inherits the same
values. A value that the user's shell already holds wins, but for those of `Variable.is_fixed`.
"""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.conf.schema import Device, RunConfig
from slipstream.orchestrator.machine import HERE, Machine

_LINK_PREFIXES = ("NCCL_", "GLOO_", "MC_", "UCX_")
RunDevice = Literal["cpu", "cuda"]
"""A device kind that is decided: Device without `auto`."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. Example: Variable("RAY_USAGE_STATS_ENABLED", "0", "no usage reports leave the machine")."""

    name: str
    value: str
    reason: str
    is_fixed: bool = False
    """Whether another value in the user's shell is overruled."""


_COMMON = (
    Variable("HF_HUB_OFFLINE", "1", "models and tokenizers are local folders; a typo must not become a download"),
    Variable("TOKENIZERS_PARALLELISM", "false", "tokenizer threads do not survive a fork of their process"),
    Variable("VLLM_NO_USAGE_STATS", "1", "no usage reports leave the machine"),
    Variable("RAY_USAGE_STATS_ENABLED", "0", "no usage reports leave the machine"),
    Variable(
        "MC_TCP_PROGRESS_TIMEOUT_SEC", "5", "Mooncake waits 30 s for a stopped peer; a publish has its own deadline"
    ),
)

_CPU = (
    Variable("OMP_NUM_THREADS", "1", "ranks and engines share the cores; more threads each only take turns"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "nobind", "vLLM wants a NUMA node for each tensor-parallel rank otherwise"),
)

_NO_MULTICAST = "NVLink multicast fails under many container runtimes and virtual machines, and nothing here needs it"
_CUDA = (
    Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers are those of nvidia-smi"),
    Variable("NCCL_NVLS_ENABLE", "0", _NO_MULTICAST),
    Variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", _NO_MULTICAST),
    Variable("NVSHMEM_DISABLE_NVLS", "1", _NO_MULTICAST),
    Variable(
        "VLLM_USE_FLASHINFER_SAMPLER", "0", "flashinfer need not be installed, and PyTorch's softmax is the trainer's"
    ),
)

_OWN_CLUSTER = (
    Variable("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0", "despite its name: makes Ray use 127.0.0.1 on Linux, too"),
    Variable("RAY_AUTH_MODE", "token", "other users of this machine reach loopback, too", is_fixed=True),
    Variable("RAY_worker_niceness", "0", "at Ray's 15 any other busy program of the machine starves engines and ranks"),
    Variable("RAY_task_events_max_num_task_in_gcs", "100", "its GCS would keep 3.6 kB of each of 100,000 calls"),
    Variable("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "300", "as long as for Ray: a busy machine needs more than its 60 s"),
    Variable("RAY_GRAFANA_DATA_DASHBOARD_UID", "slipstream", "Ray's page shows our dashboard where it has Ray Data's"),
    Variable("GLOO_SOCKET_IFNAME", "lo", "all ranks are on this machine; the host's name may not resolve"),
)


def variables(device: RunDevice, *, is_own_cluster: bool = True) -> tuple[Variable, ...]:
    """Variables of a run. `is_own_cluster`: Ray is started by the run itself, on this machine alone."""
    return (*_COMMON, *(_CPU if device == "cpu" else _CUDA), *(_OWN_CLUSTER if is_own_cluster else ()))


def variables_of(config: RunConfig) -> tuple[Variable, ...]:
    return variables(resolve_device(config.cluster.device), is_own_cluster=config.cluster.ray_address is None)


def variables_for_actors(config: RunConfig, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What actors of a cluster that is not the run's own are given: the run's variables and the user's for links.
    `environ`: Where the run was started; its values win."""
    here = os.environ if environ is None else environ
    chosen = {variable.name: here.get(variable.name, variable.value) for variable in variables_of(config)}
    return chosen | {name: value for name, value in here.items() if name.startswith(_LINK_PREFIXES)}


def apply(chosen: Sequence[Variable], environ: MutableMapping[str, str] | None = None) -> list[str]:
    """Set what is not set, or must not differ. Returns one sentence for every value of the user's own that differs, for
    the log."""
    target = os.environ if environ is None else environ
    notes: list[str] = []
    for variable in chosen:
        current = target.setdefault(variable.name, variable.value)
        if current == variable.value:
            continue
        if variable.is_fixed:
            target[variable.name] = variable.value
            notes.append(
                f"{variable.name}={current} from the environment is not used, but {variable.value}: {variable.reason}"
            )
        else:
            notes.append(
                f"{variable.name}={current} from the environment is kept; Slipstream's is {variable.value}: "
                f"{variable.reason}"
            )
    return notes


def resolve_device(device: Device, machine: Machine = HERE) -> RunDevice:
    """`auto` is cuda when this process may use a GPU, and where the packages are those for GPUs; else cpu."""
    if device is not Device.auto:
        return "cuda" if device is Device.cuda else "cpu"
    return "cuda" if machine.count_gpus() > 0 or machine.is_set_up_for_gpus() else "cpu"
