"""Slipstream as a weight-transfer backend of vLLM, for engines that are served by `vllm serve`.

    vllm serve MODEL --load-format dummy --weight-transfer-config '{"backend": "slipstream"}'

    sender (client.py, api.py)              vLLM's API                      one engine rank: this file
      init_weight_transfer_engine  ----->   on every rank  ----->   record the layout, register memory, open an endpoint
      <-- ZMQ: rank, endpoint or error ---------------------------  report it to the sender, by its key
      pause, start_weight_update   ----->   on every rank  ----->   the endpoint may begin
      begin, writes, commit  ------------- ZMQ and the link ----->   this rank is DIRTY, VERIFIED, CLEAN(v)
      finish_weight_update         ----->   on every rank  ----->   refused unless it became CLEAN since the start
      resume

For the publisher every rank is a replica of its own, because vLLM gives a backend one rank and no way to call the
others. The engine is resumed only after all of its ranks have finished, so that they serve one version or none.

Owns the life of one rank's endpoint and its thread.
Invariant: bytes change only between start_weight_update and finish_weight_update, while vLLM runs no step.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from slipstream.conf.failures import outcome_of
from slipstream.rollout.errors import EngineError, error_class
from slipstream.rollout.in_vllm.engine_process import WeightReceiver
from slipstream.rollout.in_vllm.vllm_patches import RELEASES
from slipstream.rollout.in_vllm.worker_extension import timed
from slipstream.rollout.served.client import RankReport, send_report
from slipstream.rollout.served.vllm_plugin import register
from slipstream.weight_sync.calls.loop_thread import LoopThread
from slipstream.weight_sync.replica.endpoint import ReplicaEndpoint, ReplicaHandler
from slipstream.weight_sync.replica.messages import Bound, EngineRank, Expected
from slipstream.weight_sync.replica.receiver import Receiver

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""Longest that opening or closing an endpoint may take."""
_KNOWN_DUTIES = {
    "init_transfer_engine",
    "start_weight_update",
    "finish_weight_update",
    "receive_weights",
    "shutdown",
    "trainer_send_weights",
}
"""What the supported releases of vLLM ask of a backend. One that asks for more is refused."""


@dataclass
class SlipstreamInitInfo(WeightTransferInitInfo):
    tensors: list[Any] = field(default_factory=list)
    """[name, shape, dtype] of every checkpoint tensor."""
    key: str = ""
    """In hex; signs all messages between sender and rank."""
    report_to: str = ""
    """ZMQ address of the sender, where ranks report."""
    host: str = "127.0.0.1"
    """Address at which the sender's ranks reach this engine."""
    transport: str = "auto"
    timeout_s: float = 60.0
    layouts: list[str] = field(default_factory=list)
    """Digest of the layout that each rank should have, by rank."""
    landing_bytes: int = 0
    """Memory for changes that come instead of whole parameters (weight_sync.delta_bytes)."""


@dataclass
class SlipstreamUpdateInfo(WeightTransferUpdateInfo):
    """update_weights carries no weights here. With a reason, it gives up an update, so that another can start."""

    abort: str = ""


class _Rank(WeightReceiver):
    """WeightReceiver's methods on one engine rank, which is a replica of its own here: rank 0 of 1."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.rank = 0
        self.vllm_config = vllm_config
        self.device = device
        self._model = model

    def get_model(self) -> torch.nn.Module:
        return self._model


class _Handler(ReplicaHandler):
    """One rank. Runs in the endpoint's thread; vLLM runs no step meanwhile."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.is_open = False
        """Whether vLLM has said that weights may change."""

    def close(self) -> None:
        """Free the landing zone: objects of an attach outlive it, because vLLM's heap is frozen."""
        self._receiver.close_landing()

    async def describe(self) -> Sequence[EngineRank]:
        return [self._receiver.describe()]

    async def pause(self, version: int, epoch: int, digest: str) -> None:
        """Check that vLLM was paused through its own API."""
        if not self.is_open:
            raise EngineError("no weight update is under way: post /pause and /start_weight_update first")

    async def begin(self, version: int, epoch: int, digest: str) -> Sequence[Bound]:
        binding = self._receiver.begin(version, epoch, digest)
        return [Bound(binding.session, holds=binding.holds)]

    async def verify(self, version: int, epoch: int, digest: str, expected: Sequence[Expected]) -> None:
        self._receiver.verify(version, epoch, digest, expected[0])

    async def commit(self, version: int, epoch: int) -> None:
        self._receiver.commit(version, epoch)

    async def abort(self, epoch: int, reason: str) -> None:
        self._receiver.abort(epoch, reason)


class SlipstreamTransferEngine(WeightTransferEngine[SlipstreamInitInfo, SlipstreamUpdateInfo]):
    """One engine rank's side; see the module's docstring. vLLM constructs it after the model is loaded."""

    init_info_cls = SlipstreamInitInfo
    update_info_cls = SlipstreamUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unknown = getattr(WeightTransferEngine, "__abstractmethods__", frozenset()) - _KNOWN_DUTIES
        if unknown:
            raise EngineError(
                f"this vLLM asks weight-transfer backends for {', '.join(sorted(unknown))}, which this Slipstream does "
                f"not know; supported releases are {RELEASES}"
            )
        super().__init__(*args, **kwargs)
        self._thread: LoopThread | None = None
        """In which the endpoint is served: vLLM's worker has no event loop."""
        self._endpoint: ReplicaEndpoint | None = None
        self._handler: _Handler | None = None
        self._epoch_before: int | None = None
        """The endpoint's epoch when the present update was started; None: no update is under way."""

    def init_transfer_engine(self, init_info: SlipstreamInitInfo) -> None:
        """Record, register, open an endpoint, and tell the sender that, or why not. A second call replaces the earlier
        sender."""
        parallel = self.parallel_config
        report = RankReport(
            rank=parallel.data_parallel_rank * parallel.world_size + parallel.rank,
            num_ranks=parallel.world_size * parallel.data_parallel_size,
        )
        key = bytes.fromhex(init_info.key)
        opened = outcome_of(self._open, init_info, key, report)
        if opened is not None:  # vLLM's HTTP server would answer "Internal Server Error" without the reason
            report.error, report.text = type(opened).__name__, str(opened)
        try:
            send_report(init_info.report_to, key, report, timeout_s=CALL_TIMEOUT_S)
        except zmq.ZMQError as e:  # the answer of vLLM's API has the reason, too
            logger.error("the sender at %s cannot be told: %s", init_info.report_to, e)
        if opened is not None:
            raise opened

    def _open(self, init_info: SlipstreamInitInfo, key: bytes, report: RankReport) -> None:
        self.shutdown()
        rank = _Rank(self.model, self.vllm_config, self.device)
        number = self.parallel_config.rank
        expected = init_info.layouts[number : number + 1]
        link = init_info.transport, init_info.host, init_info.timeout_s
        error, text, _ = rank.slipstream_describe(init_info.tensors, *link, expected, init_info.landing_bytes)
        if error:
            raise error_class(error)(text)
        report.is_expected, report.seconds = rank.slipstream_is_expected, rank.slipstream_seconds
        with timed(report.seconds, "endpoint"):
            self._handler = _Handler(rank.slipstream_receiver)
            self._endpoint = ReplicaEndpoint(self._handler, key, host=init_info.host)
            self._thread = LoopThread("slipstream-endpoint")
            report.endpoint = self._thread.run(self._serve(self._endpoint), CALL_TIMEOUT_S)

    async def _serve(self, endpoint: ReplicaEndpoint) -> str:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the thread's
        return await endpoint.start()

    def start_weight_update(self) -> None:
        """Let the endpoint take a publisher's begin()."""
        if self._handler is None or self._endpoint is None:
            raise EngineError("start_weight_update before init_weight_transfer_engine")
        self._epoch_before = self._endpoint.state.epoch
        self._handler.is_open = True

    def finish_weight_update(self) -> None:
        """End the update. Raises EngineError unless this rank proved every byte of one version since
        start_weight_update: do not resume then, but abort, and push again."""
        if self._handler is None or self._endpoint is None or self._epoch_before is None:
            raise EngineError(
                "finish_weight_update, but no weight update is under way: none was started, or it is over"
            )
        state = self._endpoint.state
        if not state.is_serving:
            raise EngineError(
                f"finish_weight_update, but this rank is {state.phase} (version {state.version}): it holds no committed"
                " version and must not serve; push again"
            )
        if state.epoch <= self._epoch_before:  # CLEAN since an earlier update, while other ranks may hold this one's
            raise EngineError(
                f"finish_weight_update, but this rank received nothing in this update: it holds version {state.version}"
                f" of an earlier one (epoch {state.epoch}) and must not serve; push again"
            )
        self._end_update()

    def receive_weights(self, update_info: SlipstreamUpdateInfo) -> None:
        """Always raises, because weights are written one-sided. On both releases this ends an update that failed."""
        self._end_update()  # even if this rank has committed: the next update brings new weights
        raise EngineError(
            f"weight update given up: {update_info.abort}"
            if update_info.abort
            else "update_weights carries no weights with the slipstream backend: they are written between "
            "start_weight_update and finish_weight_update, see docs/push.md"
        )

    def shutdown(self) -> None:
        if self._thread is not None and self._endpoint is not None:
            self._thread.run(self._endpoint.close(), CALL_TIMEOUT_S)
            self._thread.close()
        self._end_update()
        if self._handler is not None:
            self._handler.close()
        self._thread, self._endpoint, self._handler = None, None, None

    def _end_update(self) -> None:
        """End the update: begin and finish are refused until the next start_weight_update."""
        self._epoch_before = None
        if self._handler is not None:
            self._handler.is_open = False

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: vLLM 0.25.1 asks backends for a sender, too, but Slipstream's is weight_sync.api."""
        raise EngineError("send with slipstream.weight_sync.api.update or `slipstream push`, see docs/push.md")


class ServedWorker(WeightReceiver):
    """vLLM worker extension for a served engine; naming it makes vLLM import engine_process.py before the model loads.
    On CPUs it would otherwise move linear weights into private buffers, and it finds no plugin of a package that is not
    installed."""


register()
