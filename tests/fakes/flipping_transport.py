"""A real link that damages what it carries, when it is told to."""

import ctypes

from slipstream.weight_sync.transport.mooncake import MooncakeTransport


class FlippingTransport(MooncakeTransport):
    """Flips one bit of the next write, after it was hashed and before it leaves."""

    is_armed = False

    def write(self, session, src_ptrs, dst_ptrs, sizes, *, timeout_s):
        if self.is_armed:
            self.is_armed = False
            byte = ctypes.c_ubyte.from_address(src_ptrs[0])
            byte.value ^= 1
        super().write(session, src_ptrs, dst_ptrs, sizes, timeout_s=timeout_s)
