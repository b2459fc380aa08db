"""Triton without a GPU: it compiles up to the point where it has allocated shared memory, and launches nothing."""

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


@triton.jit
def double_kernel(x, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + place, 2 * tl.load(x + place))


class OnlyCompiles:
    """In place of CUDA's driver: what Triton asks it before it compiles. Launches nothing."""

    target = 90
    """Compute capability, times ten."""

    def get_current_device(self) -> int:
        return -self.target  # a device's kernels are kept; those compiled here are not found by a launch on one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)


def only_allocate(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    """Triton's hook: the stages of a compilation after its shared memory was allocated do nothing.

    They take nine tenths of the time. Triton calls it without arguments for what it adds to a cache's key.
    """
    if stages is None:
        return only_allocate.__name__, only_allocate.__name__
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    def allocate(module: Any, metadata: dict[str, Any]) -> str:
        """As in CUDABackend.make_llir."""
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = get_ptx_version_from_options(options, backend.target.arch)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(module, "allocate")
        metadata.update(shared=module.get_int_attr("ttg.shared"), name="never launched")
        return ""

    stages.update(llir=allocate, ptx=lambda *_: "", cubin=lambda *_: b"")
    return None
