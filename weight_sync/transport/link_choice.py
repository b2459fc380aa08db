"""Which link a request for one means on this machine. Knows no Mooncake and no torch."""

from pathlib import Path

from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.errors import LinkMismatch

LOOPBACK = "127.0.0.1"


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
    is_local = host in (LOOPBACK, "localhost")
    if kind is TransportKind.auto:
        if on_gpu and is_local and has_nvlink:
            return "nvlink"
        return "rdma" if has_hca else "tcp"
    if kind is TransportKind.nvlink:
        if not on_gpu:
            raise LinkMismatch(
                "weight_sync.transport=nvlink needs GPUs at both ends, the weights are in CPU memory; choose tcp"
            )
        if not has_nvlink:
            raise LinkMismatch(
                "weight_sync.transport=nvlink, but this Mooncake was built without it; choose tcp or rdma"
            )
    if kind is TransportKind.rdma and not has_hca:
        raise LinkMismatch(
            "weight_sync.transport=rdma, but this machine has no RDMA device in /dev/infiniband; choose tcp"
        )
    return str(kind)


def has_hca() -> bool:
    """Whether the kernel shows an RDMA device that this process may open."""
    return any(Path("/dev/infiniband").glob("uverbs*"))
