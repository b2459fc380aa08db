"""Inside a vLLM worker process: the live parameters, what vLLM's loader makes of a checkpoint, and their Receiver.

vLLM mixes `WeightReceiver` into its worker class (worker_extension_cls); `Engine.call_ranks` calls its methods on all
ranks.
Owns: which parameters there are, the form each one has after loading (or the refusal of a form that one-sided writes
cannot fill), and recording. Does not own the protocol: `weight_sync.receiver` does, and this file hands it its hooks.
Invariant: a parameter that is accepted here holds, after a commit, the bytes that vLLM's own loader would have left
there.

Forms after loading, by what vLLM chose on this device:

    linear, embedding, norm, router       identity. On CPUs vLLM would copy linear weights into private packed buffers
                                          and empty the parameter; that is switched off below, before any model loads
    experts, Triton kernels               identity
    experts, CPU kernels ("vec", "amx")   repack: cpu_prepack_moe_weight permutes each parameter in place
    experts, other kernels; quantized     refused, with the reason
    MLA's W_UK_T and W_UV                 refused: they are derived from kv_b_proj and would go stale
    empty parameters                      refused: the bytes are somewhere else
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils as vllm_layers
from vllm.config import set_current_vllm_config

from conf.errors import SlipstreamError
from conf.schema import TransportKind
from rollout.errors import UnsupportedWeights
from rollout.lifeline import OWNER_VARIABLE, end_with
from weight_sync.heap import freeze_heap
from weight_sync.layout import PostLoad, TensorMeta
from weight_sync.protocol import Expected, pack, unpack
from weight_sync.receiver import Receiver
from weight_sync.recorder import record_layout
from weight_sync.transport.mooncake import MooncakeTransport

IDENTITY_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels that read expert weights as the loader leaves them: (E, 2I, H) with gate rows first, and (E, H, I)."""

# At import, because vLLM imports its worker extension just before it loads the model, and both decisions are made while
# it loads: with oneDNN (float32, AVX512) or the AMX kernels, linear weights move into private packed copies. Their
# parameters become empty, or (lm_head) stay and are read no more, so that a write into live memory would change
# nothing.
vllm._custom_ops._supports_onednn = False
if hasattr(vllm_layers, "check_cpu_sgl_kernel"):
    vllm_layers.check_cpu_sgl_kernel = lambda *_: False

# At import too: a process of an engine must not outlive the rollout worker, not even if that is killed while it starts.
# With tp_size > 1 the EngineCore process sits in between and watches nobody.
# (Its pid comes from multiprocessing, not from getppid(), which names a stranger once the parent is gone.)
if _owner := int(os.environ.get(OWNER_VARIABLE, "0")):
    _parent = multiprocessing.parent_process()
    end_with(_owner, also_kill=[_parent.pid] if _parent is not None and _parent.pid not in (None, _owner) else [])


def _replies(method: Callable[..., Any]) -> Callable[..., tuple[str, str, Any]]:
    """Return (error class name, text, result): vLLM's RPC would flatten an exception into one string."""

    @functools.wraps(method)
    def call(*args: Any) -> tuple[str, str, Any]:
        try:
            return "", "", method(*args)
        except SlipstreamError as e:
            return type(e).__name__, str(e), None

    return call


class WeightReceiver:
    """Methods that vLLM's worker gains. `self` is the worker: rank, device, vllm_config and get_model() are vLLM's."""

    _slipstream: Receiver

    @_replies
    def slipstream_describe(
        self, tensors: Sequence[tuple[str, Sequence[int], str]], transport: str, host: str, timeout_s: float
    ) -> bytes:
        """Record the layout and register the memory. Once, after start.

        Args:
            tensors: (name, shape, dtype) of every checkpoint tensor.
            transport: weight_sync.transport.
            host: Address under which trainer ranks reach this process.
            timeout_s: Longest that a native transfer may take without progress.

        Returns:
            weight_sync.protocol.EngineRank, packed.
        """
        worker: Any = self
        model = worker.get_model()
        params = live_parameters(model)
        repacks = expert_repacks(model)
        metas = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        with set_current_vllm_config(worker.vllm_config):
            layout = record_layout(
                model.load_weights, params, metas, worker.rank, post_load=dict.fromkeys(repacks, PostLoad.repack)
            )
        device = worker.device.type
        self._slipstream = Receiver(
            params,
            layout,
            MooncakeTransport(TransportKind(transport), device=device, host=host, timeout_s=timeout_s),
            repack=lambda name, tensor: repacks[name](tensor),
            synchronize=torch.cuda.synchronize if device == "cuda" else None,
        )
        described = pack(self._slipstream.describe())
        freeze_heap()  # vLLM froze this process's heap before there was a layout
        return described

    @_replies
    def slipstream_begin(self, version: int, epoch: int, digest: str) -> bytes:
        """Receiver.begin. Returns the Binding, packed."""
        return pack(self._slipstream.begin(version, epoch, digest))

    @_replies
    def slipstream_verify(self, version: int, epoch: int, digest: str, expected: bytes) -> None:
        """Receiver.verify. `expected` is packed, one entry per rank."""
        worker: Any = self
        per_rank = unpack(tuple[Expected, ...], expected)
        self._slipstream.verify(version, epoch, digest, per_rank[worker.rank])

    @_replies
    def slipstream_commit(self, version: int, epoch: int) -> None:
        """Receiver.commit."""
        self._slipstream.commit(version, epoch)

    @_replies
    def slipstream_abort(self, epoch: int, reason: str) -> None:
        """Receiver.abort."""
        self._slipstream.abort(epoch, reason)

    @_replies
    def slipstream_state(self) -> bytes:
        """Receiver.state, packed."""
        return pack(self._slipstream.state)

    @_replies
    def slipstream_read_params(self) -> dict[str, str]:
        """sha256 of every parameter's bytes as the kernels read them. For tests and for looking into a mismatch."""
        worker: Any = self
        return {name: _sha256(param) for name, param in worker.get_model().named_parameters()}

    @_replies
    def slipstream_zero_params(self) -> None:
        """Set every parameter to zero, to show that a publish leaves nothing of what was there before. For tests."""
        worker: Any = self
        with torch.no_grad():
            for param in worker.get_model().parameters():
                param.zero_()


def live_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter that must be filled, by vLLM's name. A tied embedding and head are one, under the first name.

    Raises:
        UnsupportedWeights: A parameter is empty, or has derived copies elsewhere.
    """
    for name, module in model.named_modules():
        derived = [item for item in ("W_UK_T", "W_UV") if getattr(module, item, None) is not None]
        if derived:
            raise UnsupportedWeights(
                f"{name} keeps {', '.join(derived)}, computed from kv_b_proj; MLA models cannot be published yet"
            )
    params = {name: param.detach() for name, param in model.named_parameters()}
    empty = [name for name, param in params.items() if param.numel() == 0]
    if empty:
        raise UnsupportedWeights(
            f"{', '.join(empty[:3])} and {len(empty)} parameters in all are empty: this engine keeps their bytes in "
            "private packed copies that cannot be written"
        )
    return params


def expert_repacks(model: torch.nn.Module) -> dict[str, Callable[[torch.Tensor], None]]:
    """What a commit must do in place to each expert parameter; parameters with identity form are left out.

    Raises:
        UnsupportedWeights: Experts are stored in a form that is neither identity nor repacked by a known function.
    """
    repacks: dict[str, Callable[[torch.Tensor], None]] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "w13_weight"):
            continue
        method: Any = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if backend is None:
            raise UnsupportedWeights(
                f"{name}: experts under {type(method).__name__} are quantized; these cannot be published yet"
            )
        if backend in IDENTITY_EXPERTS:
            continue
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        isa = getattr(experts, "isa", None)
        if backend != "CPU" or isa is None or getattr(experts, "_use_zentorch", False):
            raise UnsupportedWeights(
                f"{name}: the {backend} kernels ({type(experts).__name__}) reorder expert weights after loading;"
                f" only {', '.join(IDENTITY_EXPERTS)} and the CPU kernels can be published"
            )
        for suffix in ("w13_weight", "w2_weight"):
            repacks[f"{name}.{suffix}"] = functools.partial(_prepack_in_place, isa=isa)
    return repacks


def _prepack_in_place(weight: torch.Tensor, *, isa: str) -> None:
    weight.copy_(vllm._custom_ops.cpu_prepack_moe_weight(weight, isa))


def _sha256(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
