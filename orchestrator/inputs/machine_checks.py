"""Whether this machine has what the run's processes need: devices, memory, links, ports, a Ray cluster.

    RunConfig --one function per subject--> a Fact, or a ConfigError

Does not own: how facts about it are read (orchestrator/machine.py). A cluster that is not the run's own may have other
machines, which are not checked here.
"""

import math
import os

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.sections import why_not_on_device
from slipstream.conf.errors import ConfigError
from slipstream.conf.plural import counted
from slipstream.conf.schema import Device, DType, Objective, RemoteMerge, RolloutConfig, RunConfig, TransportKind
from slipstream.conf.schema.rules import refuse_first
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, resolve_hf_config
from slipstream.orchestrator.inputs.object_store import SHM, object_store_bytes, route_bytes
from slipstream.orchestrator.machine import DASHBOARD_PORT, Machine, answers, few_open_files
from slipstream.orchestrator.socket_folder import socket_folder, where_sockets_lie
from slipstream.rollout.engine.engine_options import CPU_KV_CACHE_BYTES, CPU_RANK_BYTES
from slipstream.rollout.node_cache import where_caches_lie
from slipstream.trainer.weights.stored_adapter import num_adapted
from slipstream.weight_sync.layout import DTYPE_BYTES

MAX_PROCESSES_PER_CORE = 8
"""With more processes per core, a warning is given: they take turns, and may miss cluster.start_timeout_s."""
TRAINER_RANK_BYTES = 300 << 20
"""Memory of a rank on CPUs, without weights. Measured (Pss) with the quick start."""
ENGINE_QUEUE_BYTES = 160 << 20
"""Bytes of /dev/shm for the messages of an engine with several ranks: 10 chunks of 16 MiB (vLLM 0.32)."""
MIN_FREE_BYTES = 256 << 20
"""Free space of the run's folder, and of the one for temporary files: logs, metrics, checkpoints of a tiny model."""
BESIDE_ENGINES = "of a GPU's memory beside its engine"
FOR_GPUS = (
    "the installed vLLM is the build for GPUs, whose engines run on GPUs alone; start the run where GPUs are "
    "(slipstream launch writes a job), or set up for CPUs: SLIPSTREAM_TARGET=cpu make setup"
)


def check_devices(config: RunConfig, machine: Machine) -> Fact:
    """There are as many GPUs as processes that need one, and the options suit the kind of device."""
    trainer, rollout = config.trainer, config.rollout
    has_engines = config.algorithm.objective is Objective.policy
    processes = counted(trainer.num_ranks, "trainer rank")
    if has_engines:
        refuse_first(why_not_on_device(config))
        processes += f", {_engines(rollout)}"
        processes += f" of {rollout.tp_size} processes each" if rollout.tp_size > 1 else ""
        if rollout.workers_per_gpu > 1:
            processes += f", {rollout.workers_per_gpu} on a GPU"
    if config.cluster.device is Device.cpu:
        if has_engines and machine.is_set_up_for_gpus():
            here = "" if machine.count_gpus() else "this machine has no usable CUDA GPU, and "
            raise ConfigError(f"cluster.device=cpu, but {here}{FOR_GPUS}")
        found = f"CPU, {counted(machine.count_cpus(), 'core')}: {processes}"
        if config.model.dtype is not DType.bfloat16 or not machine.is_slow_in_bfloat16():
            return Fact("devices", found)
        slow = "this CPU has no AVX-512 and is many times slower in model.dtype=bfloat16 than in float32"
        return Fact("devices", f"{found}; {slow}; set model.dtype=float32 (not with linear attention)", is_warning=True)
    if config.cluster.ray_address is not None:
        return Fact("devices", f"GPUs of the Ray cluster at {config.cluster.ray_address}: {processes}")
    present = machine.count_gpus()
    needed = 1 if config.cluster.share_gpu else trainer.num_ranks + (rollout.num_gpus if has_engines else 0)
    if present == 0:
        trouble = f"cluster.device=cuda, and this machine has no usable CUDA GPU{_hidden_gpus()}"
        if machine.is_set_up_for_gpus():
            raise ConfigError(f"{trouble}: {FOR_GPUS}")
        needs_gpus = has_engines and config.weight_sync.transport is TransportKind.nvlink
        raise ConfigError(f"{trouble}; set cluster.device=cpu" + (" weight_sync.transport=auto" if needs_gpus else ""))
    if needed > present:
        engines = f" + rollout.num_workers={rollout.num_workers} * rollout.tp_size={rollout.tp_size}"
        if rollout.workers_per_gpu > 1:
            engines += f" / rollout.workers_per_gpu={rollout.workers_per_gpu}"
        ranks = f"trainer.num_ranks={trainer.num_ranks}{engines if has_engines else ''}"
        raise ConfigError(
            f"more GPUs than exist: {ranks} need {needed}, and this machine has {present}{_hidden_gpus()}; lower them "
            "to fit"
        )
    return Fact("devices", f"{needed} of {present} GPUs: {processes}")


def check_memory(config: RunConfig, machine: Machine) -> Fact:
    """The processes of a run on CPUs fit into memory, and are not many more than the cores."""
    if config.cluster.device is not Device.cpu or config.cluster.ray_address is not None:
        return Fact("memory", "not looked at: GPUs, or the machines of a Ray cluster")
    num_ranks, rollout = config.trainer.num_ranks, config.rollout
    num_workers = rollout.most_workers if config.algorithm.objective is Objective.policy else 0
    num_engine_ranks = num_workers * rollout.tp_size
    weights = _weight_bytes(config) * (1 + num_workers) + _base_bytes(config) * num_workers
    cache = CPU_KV_CACHE_BYTES if rollout.kv_cache_bytes is None else rollout.kv_cache_bytes
    needed = weights + num_ranks * TRAINER_RANK_BYTES + num_engine_ranks * (CPU_RANK_BYTES + cache)
    needed += num_engine_ranks * _zone_bytes(config)
    _, available = machine.memory_bytes()
    processes = f"trainer.num_ranks={num_ranks}"
    if num_workers:
        processes += f" and rollout.num_workers={rollout.num_workers} * rollout.tp_size={rollout.tp_size}"
    if needed > available:
        raise ConfigError(
            f"{processes} need at least {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free; lower "
            f"them{', or rollout.kv_cache_bytes' if num_workers else ''}{_without_more(config)}"
        )
    found = f"needs at least {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free"
    cores = machine.count_cpus()
    if num_ranks + num_engine_ranks <= MAX_PROCESSES_PER_CORE * cores:
        return Fact("memory", found)
    return Fact("memory", f"{found}; {processes} are many processes for {cores} cores; lower them", is_warning=True)


def check_base_has_room(config: RunConfig, machine: Machine) -> Fact | None:
    """GPU engines that merge for themselves have memory for what they merge into. On CPUs check_memory counts it."""
    sync, rollout, num_bytes = config.weight_sync, config.rollout, _base_bytes(config)
    if num_bytes == 0 or config.cluster.device is Device.cpu:
        return None
    gpus = machine.list_gpus()
    is_on_host = sync.remote_merge is RemoteMerge.host
    if config.cluster.ray_address is not None or (not is_on_host and not gpus):
        return Fact("base", f"at least {num_bytes / 1e9:.1f} GB an engine; not looked at where there is room for it")
    if is_on_host:
        needed, (_, room) = num_bytes * rollout.most_workers, machine.memory_bytes()
        where, cure = "of host memory", "lower rollout.num_workers"
    else:
        needed = num_bytes // rollout.tp_size * rollout.workers_per_gpu
        room, cure = _beside_engines(config, min(gpu.memory_bytes for gpu in gpus))
        where, cure = BESIDE_ENGINES, f"{cure}, set weight_sync.remote_merge=host"
    if needed > room:
        raise ConfigError(
            f"weight_sync.remote_merge={sync.remote_merge} keeps what is merged into once more, at least "
            f"{needed / 1e9:.1f} GB {where}, and {max(room, 0) / 1e9:.1f} GB are free; {cure}{_without_more(config)}"
        )
    return Fact("base", f"at least {needed / 1e9:.1f} GB {where}, {room / 1e9:.1f} GB are free")


def check_zone_has_room(config: RunConfig, machine: Machine) -> Fact | None:
    """GPU engines have memory for the changes that land beside them. On CPUs check_memory counts it."""
    needed, cluster = _zone_bytes(config) * config.rollout.workers_per_gpu, config.cluster
    if needed == 0 or cluster.device is Device.cpu or cluster.ray_address is not None:
        return None
    if not (gpus := machine.list_gpus()):
        return None
    room, cure = _beside_engines(config, min(gpu.memory_bytes for gpu in gpus))
    found = f"{needed / 1e9:.1f} GB {BESIDE_ENGINES}, {max(room, 0) / 1e9:.1f} GB are free"
    if needed > room:
        raise ConfigError(f"weight_sync.delta_bytes takes {found}; {cure}{_without_more(config)}")
    return Fact("landing zone", found)


def _beside_engines(config: RunConfig, gpu_bytes: int) -> tuple[int, str]:
    """What engines leave of a GPU's memory at most, and what has them leave more."""
    rollout = config.rollout
    if rollout.kv_cache_bytes is None:
        return gpu_bytes - int(gpu_bytes * rollout.gpu_memory_utilization), "lower rollout.gpu_memory_utilization"
    engine = _weight_bytes(config) // rollout.tp_size + rollout.kv_cache_bytes
    return gpu_bytes - engine * rollout.workers_per_gpu, "lower rollout.kv_cache_bytes"


def _engines(rollout: RolloutConfig) -> str:
    if rollout.is_range:
        return f"{rollout.least_workers} to {counted(rollout.most_workers, 'engine')}"
    return counted(rollout.least_workers, "engine")


def _weight_bytes(config: RunConfig) -> int:
    """Bytes of the weights in the engines' format, once; 0 for a model that check_model refuses."""
    try:
        tensors = engine_checkpoint(resolve_hf_config(config.model), config.model.dtype)
    except ConfigError:
        return 0
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)


def _base_bytes(config: RunConfig) -> int:
    """Bytes that one engine, over all its ranks, keeps at least to merge into; 0 if it merges nothing."""
    if config.algorithm.objective is not Objective.policy or config.weight_sync.remote_merge is RemoteMerge.none:
        return 0
    try:
        spec = read_config(resolve_hf_config(config.model))
    except ConfigError:
        return 0
    return num_adapted(spec, config.trainer.lora) * DTYPE_BYTES[config.model.dtype.value]


def _zone_bytes(config: RunConfig) -> int:
    return config.weight_sync.delta_bytes if config.algorithm.objective is Objective.policy else 0


def _without_more(config: RunConfig) -> str:
    """How engines do without what a publish needs beside them."""
    if _zone_bytes(config):
        return ", or lower weight_sync.delta_bytes"
    return ", or set weight_sync.remote_merge=none" if _base_bytes(config) else ""


def check_routes(config: RunConfig, machine: Machine) -> Fact | None:
    per_token, needed = route_bytes(config)
    if not needed:
        return None
    found = f"recorded and replayed: {per_token} bytes per token, {needed / 1e9:.2f} GB at most at a time"
    store = object_store_bytes(config, machine)
    if needed <= store or config.cluster.ray_address is not None:
        return Fact("routes", found)
    return Fact(
        "routes",
        f"{found}, more than the {store >> 20} MiB that Ray's object store gets, half of what /dev/shm has free; the "
        "rest becomes files: enlarge /dev/shm (docker run --shm-size=16g)",
        is_warning=True,
    )


def check_shared_memory(config: RunConfig, machine: Machine) -> Fact:
    """/dev/shm holds Ray's object store and the message queues of engines with several ranks."""
    if config.cluster.ray_address is not None:
        return Fact("/dev/shm", "not looked at: the machines of a Ray cluster")
    free = machine.free_bytes(SHM)
    found = f"{free >> 20} MiB free"
    rollout, store = config.rollout, object_store_bytes(config, machine)
    is_in_several = config.algorithm.objective is Objective.policy and rollout.tp_size > 1
    queues = rollout.most_workers * ENGINE_QUEUE_BYTES if is_in_several else 0
    cure = "enlarge it (docker run --shm-size=2g)"
    if queues > free:
        raise ConfigError(
            f"/dev/shm has {found}, and rollout.num_workers={rollout.num_workers} engines of "
            f"rollout.tp_size={rollout.tp_size} take {queues >> 20} MiB there; {cure}, or set rollout.tp_size=1"
        )
    if store <= free:
        return Fact("/dev/shm", found)
    slow = f"{found}: Ray's object store of {store >> 20} MiB will be files in /tmp, which is slower"
    return Fact("/dev/shm", f"{slow}; {cure}", is_warning=True)


def check_caches(config: RunConfig, machine: Machine) -> Fact:
    return Fact("caches", f"in {where_caches_lie()}")


def check_sockets(config: RunConfig, machine: Machine) -> Fact:
    """Ray and the engines find a folder for their Unix sockets, and for what they write until the run ends."""
    if config.cluster.ray_address is not None:
        return Fact("sockets", "not looked at: the machines of a Ray cluster")
    where, free = where_sockets_lie(), machine.free_bytes(socket_folder())
    if free >= MIN_FREE_BYTES:
        return Fact("sockets", f"in {where}")
    full = f"; it has {free >> 20} MiB of free space, and Ray's logs and temporary files lie there: make room, or set"
    return Fact("sockets", f"in {where}{full} TMPDIR to another folder", is_warning=True)


def check_open_files(config: RunConfig, machine: Machine) -> Fact | None:
    """A process may have as many files and sockets open as Ray's do."""
    few = few_open_files(machine.most_open_files())
    return Fact("open files", few, is_warning=True) if few and config.cluster.ray_address is None else None


def check_link(config: RunConfig, machine: Machine) -> Fact | None:
    """The requested link is possible here. When it is opened, it is checked that it is the one in use."""
    if config.algorithm.objective is not Objective.policy:
        return None
    transport = config.weight_sync.transport
    if transport is TransportKind.rdma and not machine.list_rdma_nics() and config.cluster.ray_address is None:
        raise ConfigError(
            "weight_sync.transport=rdma, and this machine has no RDMA device (/sys/class/infiniband); set "
            "weight_sync.transport=auto"
        )
    fastest = transport is TransportKind.auto
    return Fact("weights", f"travel over {'the fastest link that both ends have' if fastest else transport.value}")


def check_ray_cluster(config: RunConfig, machine: Machine) -> Fact:
    address = config.cluster.ray_address
    if address is None:
        return Fact("ray", "a cluster of its own")
    found = machine.running_ray_cluster() if address == "auto" else address
    if found is None and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            "cluster.ray_address=auto, and no Ray cluster runs on this machine; start one (ray start --head), or let "
            "the run start its own: cluster=local"
        )
    host, _, port = (found or "").rpartition(":")
    if host and port.isdigit() and not answers(host, int(port)):
        raise ConfigError(
            f"cluster.ray_address={address}: nothing answers at {found}; give the address that `ray start` printed, or "
            "let the run start its own cluster: cluster=local"
        )
    return Fact("ray", f"the cluster at {found or os.environ['RAY_ADDRESS']}")


def check_dashboard_port(config: RunConfig, machine: Machine) -> Fact:
    """Where the Ray dashboard will be: at Ray's own port, or one near it."""
    cluster = config.cluster
    if cluster.ray_address is not None or not cluster.dashboard:
        return Fact("dashboard", "off" if cluster.ray_address is None else "the Ray cluster's own")
    free = machine.free_port(DASHBOARD_PORT)
    taken = "" if free == DASHBOARD_PORT else f" ({DASHBOARD_PORT} is taken)"
    return Fact("dashboard", f"http://127.0.0.1:{free}{taken}" if free is not None else "on a port of Ray's choice")


def _hidden_gpus() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""


MACHINE_CHECKS = (
    check_devices,
    check_memory,
    check_base_has_room,
    check_zone_has_room,
    check_routes,
    check_shared_memory,
    check_caches,
    check_sockets,
    check_open_files,
    check_link,
    check_ray_cluster,
    check_dashboard_port,
)
