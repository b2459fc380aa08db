"""What a link must know of this machine: which links there are, which allocations hold tensors, which ports are open.

Owns: the choice of a link, finding allocations, closing ports to other machines. Knows no Mooncake.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.errors import LinkMismatch, TransferFailed
from slipstream.weight_sync.transport.base import MemoryRange, range_of

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = b"lo\0"
WILDCARDS = ("0.0.0.0", "::")


def choose_link(kind: TransportKind, *, device: str, host: str, has_hca: bool, has_nvlink: bool, has_cuda: bool) -> str:
    """The link that a request means on this machine. Pure.

    auto: nvlink if memory is on GPUs and all peers are on this host, otherwise rdma if there is an HCA, otherwise tcp.
    nvlink is Mooncake's name for CUDA IPC between GPUs of one host.

    Raises:
        LinkMismatch: The requested link is not available; the message says why.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu and not has_cuda:
        raise LinkMismatch(
            "weights are on GPUs, but this Mooncake has no CUDA support; install mooncake-transfer-engine-cuda13"
        )
    if kind is TransportKind.auto:
        if on_gpu and host in (LOOPBACK, "localhost") and has_nvlink:
            return "nvlink"
        return "rdma" if has_hca else "tcp"
    if kind is TransportKind.nvlink and not on_gpu:
        raise LinkMismatch(
            "weight_sync.transport=nvlink needs GPUs at both ends, the weights are in CPU memory; choose tcp"
        )
    if kind is TransportKind.nvlink and not has_nvlink:
        raise LinkMismatch("weight_sync.transport=nvlink, but this Mooncake was built without it; choose tcp or rdma")
    if kind is TransportKind.rdma and not has_hca:
        raise LinkMismatch(
            "weight_sync.transport=rdma, but this machine has no RDMA device in /dev/infiniband; choose tcp"
        )
    return str(kind)


def has_hca() -> bool:
    """Whether the kernel shows an RDMA device that this process may open."""
    return any(Path("/dev/infiniband").glob("uverbs*"))


def allocations_of(tensors: Sequence[torch.Tensor]) -> dict[MemoryRange, MemoryRange]:
    """The allocation that holds each tensor: of CPU memory its storage, of CUDA memory the caching allocator's segment.
    A segment is one cudaMalloc, and CUDA IPC exports nothing smaller.

    Raises:
        TransferFailed: The memory of a CUDA tensor cannot be exported.
    """
    storages = {range_of(one): one.untyped_storage() for one in tensors if not one.is_cuda}
    found = {own: MemoryRange(storage.data_ptr(), storage.nbytes()) for own, storage in storages.items()}
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    segments = [
        (MemoryRange(s["address"], s["total_size"]), bool(s.get("is_expandable")))
        for s in (torch.cuda.memory.memory_snapshot() if on_gpu else ())  # pyright: ignore[reportUnknownMemberType]
    ]
    for own in map(range_of, on_gpu):
        holder = next((one for one in segments if one[0].address <= own.address < one[0].stop), None)
        if holder is None:
            raise TransferFailed(
                f"a tensor of {own.num_bytes} bytes at {own.address:#x} is not in torch's caching"
                " allocator (sleep mode or a custom allocator?): it cannot be exported to other processes"
            )
        found[own], is_expandable = holder
        if is_expandable:
            raise TransferFailed(
                "weights are in expandable segments, which cannot be exported to other processes:"
                " remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
            )
    return found


@contextlib.contextmanager
def new_listeners_on_loopback() -> Generator[None]:
    """Bind to the loopback device the sockets that began to listen on all interfaces, in this process, while the block
    ran: the kernel then refuses connections over any other one. That includes sockets that another thread opened
    meanwhile. Linux only. Users of this machine can still reach the ports.
    """
    before = set(_wildcard_listeners())
    yield
    for inode, descriptor in _wildcard_listeners().items():
        if inode in before:
            continue
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK_DEVICE)
            except OSError as e:
                logger.warning("port %d stays open to all interfaces: %s", listener.getsockname()[1], e)


def _wildcard_listeners() -> dict[str, int]:
    """TCP sockets of this process that listen on every interface: their inode and one descriptor."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not a socket
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                is_internet = one.family in (socket.AF_INET, socket.AF_INET6)
                is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_internet and is_listening and one.getsockname()[0] in WILDCARDS:
                    found[inode] = int(name)
    return found
