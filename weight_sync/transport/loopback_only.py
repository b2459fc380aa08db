"""Restricts listening sockets to the loopback interface, for a library that listens on all interfaces.

Mooncake's TCP link listens on every interface, whatever it is told. Its sockets belong to this process, so they can be
bound to the loopback device here: the kernel then refuses connections over any other interface. Linux only. Users of
this machine can still reach the ports.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Generator

logger = logging.getLogger(__name__)

LOOPBACK_DEVICE = b"lo\0"
WILDCARDS = ("0.0.0.0", "::")


@contextlib.contextmanager
def new_listeners_on_loopback() -> Generator[None]:
    """Bind to loopback the sockets that began to listen on all interfaces, in this process, while the block ran.

    That includes sockets that another thread opened meanwhile.
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
