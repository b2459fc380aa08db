"""The engines that a push starts on this machine: their GPUs, ports and logs, and the address where they reach us.

Owns: refusing what this machine cannot start, before it starts anything. Does not own a server's process
(`rollout.served.servers`) nor the order of a push (`command.py`).
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Sequence

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device
from slipstream.orchestrator.machine import Machine, is_port_free
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.rollout.engine.engine_options import CPU_RANK_BYTES
from slipstream.rollout.served.client import LOOPBACK, ServedEngine, is_own_address
from slipstream.rollout.served.servers import ServerOptions, ServerProcess

FIRST_PORT = 8000
"""vLLM's own."""


def start_servers(
    options: PushOptions, device: Device, gpus: Sequence[str], cleanup: contextlib.ExitStack
) -> list[ServerProcess]:
    """Start options.start engines with dummy weights; `cleanup` ends them.

    Raises:
        ConfigError: There are too few GPUs, a port is taken, or the host or the log folder cannot be used.
    """
    needed = options.start * options.tp_size
    if gpus and needed > len(gpus):
        raise ConfigError(
            f"--start {options.start} with --tp {options.tp_size} needs {needed} GPUs, there are {len(gpus)}"
        )
    with socket.socket() as probe:
        try:
            probe.bind((options.host, 0))
        except OSError as e:
            raise ConfigError(
                f"--host {options.host} is no address of this machine ({e.strerror}); give one, such as 127.0.0.1"
            ) from e
    ports = _ports(options)
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--log-dir={options.log_dir} cannot be made ({e.strerror}); choose another") from e
    common = ServerOptions(
        options.checkpoint,
        device,
        options.host,
        options.tp_size,
        options.enable_expert_parallel,
        options.dtype,
        options.serve_words,
    )
    servers: list[ServerProcess] = []
    for number, port in enumerate(ports):
        own = gpus[number * options.tp_size : (number + 1) * options.tp_size]
        server = ServerProcess(common, port, own, options.log_dir / f"engine-{port}.log")
        cleanup.callback(server.stop)
        servers.append(server)
    return servers


def check_memory(options: PushOptions, checkpoint_bytes: int, machine: Machine) -> None:
    """Raises ConfigError where the engines do not fit into the memory of a machine without GPUs."""
    needed = options.start * (checkpoint_bytes + options.tp_size * CPU_RANK_BYTES)
    _, available = machine.memory_bytes()
    if needed > available:
        raise ConfigError(
            f"--start {options.start} with --tp {options.tp_size} needs at least {needed / 1e9:.1f} GB of memory, and "
            f"{available / 1e9:.1f} GB are free; start fewer"
        )


def _ports(options: PushOptions) -> Sequence[int]:
    """A port for each engine: from --port on, or the first free ones from FIRST_PORT on."""
    if options.port is None:
        free = (port for port in range(FIRST_PORT, 65536) if is_port_free(port, options.host))
        return list(itertools.islice(free, options.start))
    ports = range(options.port, options.port + options.start)
    taken = [port for port in ports if not is_port_free(port, options.host)]
    if taken:
        raise ConfigError(f"port {taken[0]} is taken; choose another first port with --port")
    return ports


def visible_gpus(device: Device, machine: Machine) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES; empty on CPUs."""
    if device is not Device.cuda:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(machine.count_gpus())]


def local_host(engines: Sequence[ServedEngine]) -> str:
    """Address at which the engines reach this machine: loopback if they are here, or else that of the route."""
    remote = [engine.host for engine in engines if not is_own_address(engine.host)]
    if not remote:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))  # sends nothing, but makes the kernel choose the route
        return probe.getsockname()[0]
