"""Inside a vLLM worker process: records where vLLM's loader writes, and gives the live parameters to a Receiver.

vLLM mixes `WeightReceiver` into its worker class (worker_extension_cls, by way of engine_process.py);
`Engine.call_ranks` calls its methods on all ranks.
Owns: recording the layout of a live engine rank, and handing its memory and hooks to a Receiver. Does not own what vLLM
does to a weight after loading, nor the refusal of forms that one-sided writes cannot fill (`post_load.py`).
Invariant: after a commit, an accepted parameter holds the bytes that vLLM's own loader would have left there.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config

from slipstream.conf.errors import SlipstreamError
from slipstream.conf.schema import TransportKind
from slipstream.rollout.in_vllm.activations import ActivationRecorder
from slipstream.rollout.in_vllm.adapter_slots import own_stream, slot_receivers, without_adapters
from slipstream.rollout.in_vllm.post_load import Forms, load_time_parameters, refuse_unwritable
from slipstream.rollout.receivers import Receivers, SlotReceivers
from slipstream.weight_sync.calls.server import serve_in_thread
from slipstream.weight_sync.calls.verbs import Verb, verbs_of
from slipstream.weight_sync.disk.regions import RegionReader
from slipstream.weight_sync.gc_freeze import freeze_heap
from slipstream.weight_sync.layout import TensorMeta
from slipstream.weight_sync.merging.factors import OwnMergeSpec
from slipstream.weight_sync.record.layout_wire import layouts_digest
from slipstream.weight_sync.record.recorder import record_layout
from slipstream.weight_sync.record.repeated_layers import record_repeating
from slipstream.weight_sync.replica.own_merge import OwnMerge
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.transport.mooncake import MooncakeTransport
from slipstream.weight_sync.typed_msgpack import pack, unpack

ClassT = TypeVar("ClassT", bound=type)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store under `name` how many seconds the block ran."""
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


def _replies(method: Callable[..., Any]) -> Callable[..., tuple[str, str, Any]]:
    """Return (error class name, text, result), because vLLM's RPC would flatten an exception into one string."""

    @functools.wraps(method)
    def call(*args: Any) -> tuple[str, str, Any]:
        try:
            return "", "", method(*args)
        except SlipstreamError as e:
            return type(e).__name__, str(e), None

    return call


def _with_verbs(cls: ClassT) -> ClassT:
    """Give WeightReceiver a method slipstream_VERB for each verb of Receivers."""

    def served(verb: Verb) -> Callable[..., tuple[str, str, Any]]:
        return _replies(lambda self, given: pack(verb.asked(self.slipstream_receivers, given)))

    for name, verb in verbs_of(Receivers).items():
        setattr(cls, f"slipstream_{name}", served(verb))
    return cls


@_with_verbs
class WeightReceiver:
    """Methods added to vLLM's worker, which has the first five attributes."""

    rank: int
    device: torch.device
    vllm_config: Any
    get_model: Callable[[], Any]
    model_runner: Any
    slipstream_receiver: Receiver
    slipstream_receivers: Receivers
    _slipstream_transport: MooncakeTransport
    _slipstream_recorder: ActivationRecorder
    slipstream_seconds: dict[str, float]
    """Seconds of slipstream_describe, by step."""
    slipstream_is_expected: bool
    """Whether the layout was proven to be the expected one."""

    @_replies
    def slipstream_describe(
        self,
        tensors: Sequence[tuple[str, Sequence[int], str]],
        transport: str,
        host: str,
        timeout_s: float,
        expected: Sequence[str] = (),
        landing_bytes: int = 0,
        own_merge: bytes = b"",
    ) -> bytes:
        """Record the layout and register the memory. Call it once, after start.

        Without `expected` every layer is recorded. With it, two layers of each kind are, and the others are derived
        from them. If the result equals the expected layout, which was recorded layer by layer from the same model's
        loader, it is this engine's, too; otherwise every layer is recorded.

        Args:
            tensors: (name, shape, dtype) of every checkpoint tensor.
            transport: weight_sync.transport.
            host: Address at which trainer ranks reach this process.
            timeout_s: Longest that a native transfer may take without progress.
            expected: layout_wire.layouts_digest of a layout that was recorded elsewhere, over all layers; by rank.
            landing_bytes: weight_sync.delta_bytes.
            own_merge: OwnMergeSpec, packed, if this engine merges for itself.

        Returns EngineRank, packed.
        """
        seconds = self.slipstream_seconds = {}
        refuse_unwritable(self.vllm_config)
        model = self.get_model()
        metas = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        with timed(seconds, "record"), set_current_vllm_config(self.vllm_config), without_adapters(self):
            forms = Forms.of(model, self.vllm_config.model_config.dtype)
            given = (model.load_weights, forms.params, metas, self.rank)
            with load_time_parameters(model):
                own = expected[self.rank] if self.rank < len(expected) else ""
                layout = record_repeating(*given, post_load=forms.post_load) if own else None
                self.slipstream_is_expected = layout is not None and layouts_digest((layout,)) == own
                if layout is None or not self.slipstream_is_expected:
                    layout = record_layout(*given, post_load=forms.post_load)
        with timed(seconds, "link"):
            self._open_link(transport, host, timeout_s)
        params, merging = forms.params, None
        if own_merge:
            with timed(seconds, "base"):
                spec = unpack(OwnMergeSpec, own_merge)
                merging = OwnMerge(layout, params, spec.merges, on_device=spec.on_device)
                merging.read_base(RegionReader(Path(spec.folder), [meta.name for meta in metas]).read)
                params, layout = params | merging.factors, merging.layout
        with timed(seconds, "register"):
            self.slipstream_receiver = Receiver(
                params,
                layout,
                self._slipstream_transport,
                repack=forms.repack,
                recompute=forms.recompute,
                synchronize=torch.cuda.synchronize if self.device.type == "cuda" else None,
                landing_bytes=landing_bytes,
                own_merge=merging,
            )
            self.slipstream_receivers = Receivers([self.slipstream_receiver])
        with timed(seconds, "describe"):
            described = pack(self.slipstream_receiver.describe())
            freeze_heap()  # vLLM froze the heap before the layout was in it
        return described

    @_replies
    def slipstream_open_link(self, transport: str, host: str, timeout_s: float) -> None:
        """Open the link of an engine whose own weights are neither written nor read. Arguments: slipstream_describe."""
        self._open_link(transport, host, timeout_s)

    def _open_link(self, transport: str, host: str, timeout_s: float) -> None:
        self._slipstream_transport = MooncakeTransport(
            TransportKind(transport), device=self.device.type, host=host, timeout_s=timeout_s
        )

    @_replies
    def slipstream_open_slots(self, tensors: Sequence[tuple[str, Sequence[int], str]], key: bytes) -> bytes:
        """Record the layout of an adapter slot of these factors (name, shape, dtype), register all slots, and serve
        them. Call it once, with the link open. Returns where they are served, and EngineRank, packed."""
        metas = [TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        slots, rank = slot_receivers(self, metas, self._slipstream_transport, self.rank)
        address = serve_in_thread(slots, key, SlotReceivers, functools.partial(own_stream, self.device))
        described = pack((address, rank))
        freeze_heap()
        return described

    @_replies
    def slipstream_record_activations(self) -> None:
        """Record what the model computes from now on (activations.py). The engine must run eagerly."""
        self._slipstream_recorder = ActivationRecorder(self.get_model())

    @_replies
    def slipstream_write_activations(self, file: str) -> None:
        """Stop recording and write what was recorded, as safetensors. Of several ranks, the first one's."""
        recorded = self._slipstream_recorder.finish()
        if self.rank == 0:
            save_file(recorded, file)
