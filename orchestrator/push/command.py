"""`slipstream push`: a checkpoint on disk into the memory of vLLM engines, started here or already served.

    --start N    vllm serve, N times, dummy weights ----+
                 their layouts, recorded beside them ---+--> attach --> pause --> publish --> verify, commit --> resume
    --to URL     engines that run ----------------------+         ^
                 ranks: read the disk, each its share; plan ------+

Owns: the order of these steps, and progress. Does not own the flags (`push_options.py`), a rank
(`sender_process.py`), the start of engines (`engine_starts.py`), their control (`rollout.served.client`), the publish,
or the report (`push_report.py`). Invariant: an engine is resumed only after every byte of the checkpoint was proven in
the memory of all its ranks; otherwise it stays paused and is named. Until the first rank may write, an engine that
served goes on serving, whatever fails.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.conf.checks.tensor_parallel import check_tp_size_fits_model
from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import in_daemon_thread, in_words, undone_by
from slipstream.conf.schema import Device, DType
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.inputs.model_files import read_hf_config
from slipstream.orchestrator.machine import HERE, Machine
from slipstream.orchestrator.push.engine_starts import check_memory, local_host, start_servers, visible_gpus
from slipstream.orchestrator.push.push_options import DELTA_MIB, PushOptions
from slipstream.orchestrator.push.push_report import PushReport, check_all_serve, describe
from slipstream.orchestrator.push.sender_process import RankOptions, RankProcess
from slipstream.rollout.errors import EngineError
from slipstream.rollout.layouts.offline_layout import LayoutRequest, offline_layouts
from slipstream.rollout.served.client import LOOPBACK, Rendezvous, ServedEngine
from slipstream.rollout.served.servers import ServerProcess
from slipstream.weight_sync.disk.safetensors_files import read_index, tensor_metas
from slipstream.weight_sync.layout import DestLayout, TensorMeta, first_difference
from slipstream.weight_sync.record.layout_wire import layouts_digest

POLL_S = 0.05
PROGRESS_S, SAY_AGAIN_S = 2.0, 30.0


class Push:
    """One run of the command. Use as a context manager: leaving it ends what it started.

    Args:
        machine: The machine whose GPUs and NICs are used.
        make_engine: Called with the URL of a running engine.
        make_rank: Called with a rank's number, its options and its GPU.
    """

    def __init__(
        self,
        options: PushOptions,
        *,
        machine: Machine = HERE,
        make_engine: Callable[..., ServedEngine] = ServedEngine,
        make_rank: Callable[..., RankProcess] = RankProcess,
    ) -> None:
        self._make_engine, self._make_rank = make_engine, make_rank
        self._options = options
        self._began = time.monotonic()
        self._hf_config = read_hf_config(options.checkpoint, "CHECKPOINT")
        check_tp_size_fits_model(
            "--tp", options.tp_size, self._hf_config, is_expert_parallel=options.enable_expert_parallel
        )
        stored = read_index(options.checkpoint, "CHECKPOINT")
        self._tensors = tensor_metas(stored)
        if options.base is not None:
            _check_is_base(options.base, self._tensors)
        self._landing_bytes = 0 if options.base is None else (options.delta_mib or DELTA_MIB) << 20
        self._device = Device(resolve_device(Device.auto, machine))
        self._gpus = visible_gpus(self._device, machine)
        if not self._gpus:
            check_memory(options, sum(file.stat().st_size for file in {one.path for one in stored.values()}), machine)
        if options.transport == "nvlink" and not self._gpus:
            raise ConfigError("--transport nvlink: this machine has no usable GPU; choose auto or tcp")
        if options.transport == "rdma" and not machine.list_rdma_nics():
            raise ConfigError("--transport rdma: this machine has no RDMA device; choose auto or tcp")
        self._key = secrets.token_bytes(32)
        self._cleanup = contextlib.ExitStack()
        self._servers: list[ServerProcess] = []
        self._ranks: list[RankProcess] = []
        self._said, self._said_at_s = "", 0.0

    def __enter__(self) -> Push:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def run(self) -> PushReport:
        """Read, start, publish, resume.

        Raises:
            ConfigError: Nothing can be done as asked.
            PushError, EngineError: A rank or an engine failed; engines that --start started are ended.
        """
        options = self._options
        engines = [self._make_engine(url, timeout_s=options.timeout_s) for url in options.to]
        if twice := [url for url, num in Counter(engine.url for engine in engines).items() if num > 1]:
            raise ConfigError(f"--to names an engine twice: {', '.join(twice)}")
        for engine in engines:
            if not engine.is_healthy():
                raise EngineError(
                    f"--to {engine.url}: no engine answers there (GET /health); wait until it is up, or give the "
                    "address that it serves at"
                )
        if options.start:
            self._servers = start_servers(options, self._device, self._gpus, self._cleanup)
            engines = [server.engine for server in self._servers]
        host = local_host(engines)
        for engine in engines:
            if engine.host == LOOPBACK:  # if others are on other machines, all use one kind of link
                engine.host = host
        num_ranks = options.num_ranks or max(
            1, min(len(self._gpus), options.start * options.tp_size or len(self._gpus))
        )
        base = "" if options.base is None else str(options.base)
        report = PushReport(str(options.checkpoint), 0, num_ranks, self._device.value, base=base)
        expected = in_daemon_thread(self._expected_layouts, report) if options.start else None
        self._start_ranks(num_ranks, host)
        self._say(len(self._servers))
        endpoints = self._wait_until_ready(engines, expected, report)
        self._say(0)
        self._publish(endpoints, report)
        return report

    def watch(self) -> None:
        """Wait until an engine ends.

        Raises:
            EngineError: Names it.
        """
        while True:
            for server in self._servers:
                if not server.is_running:
                    raise server.why_it_ended()
            time.sleep(1.0)

    def _start_ranks(self, num_ranks: int, host: str) -> None:
        folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-push-"))
        common = RankOptions(
            self._options,
            world_size=num_ranks,
            device=self._device.value,
            host=host,
            delta_bytes=self._landing_bytes,
            key=self._key,
            rendezvous=f"file://{folder}/rendezvous",
        )
        for rank in range(num_ranks):
            process = self._make_rank(rank, common, self._gpus[rank % len(self._gpus)] if self._gpus else None)
            self._cleanup.callback(process.stop)
            self._ranks.append(process)

    def _expected_layouts(self, report: PushReport) -> tuple[DestLayout, ...]:
        """Per rank of an engine, the layout of the checkpoint, recorded while engines start; () if it is unknown.

        Only an expectation: engines prove that it is theirs. If it is not (for example because words after -- change
        the model), they record every layer themselves.
        """
        options = self._options
        named = self._hf_config.get("dtype") or self._hf_config.get("torch_dtype")
        try:
            request = LayoutRequest(
                hf_config=self._hf_config,
                tensors=self._tensors,
                tp_size=options.tp_size,
                enable_expert_parallel=options.enable_expert_parallel,
                dtype=DType(str(named) if options.dtype == "auto" else options.dtype),
                device=self._device,
                every_layer=True,
            )
            layouts = offline_layouts(request)
        except (EngineError, ValueError) as e:  # ValueError: a format that no layout is recorded in
            report.expected_error = str(e)
            return ()
        return tuple(replace(layout, rank=0) for layout in layouts)  # each rank is a replica of its own

    def _wait_until_ready(
        self, engines: Sequence[ServedEngine], expected: Future[tuple[DestLayout, ...]] | None, report: PushReport
    ) -> dict[ServedEngine, list[str]]:
        """Wait until all shares are read, and all engines are attached and connected to every rank. Returns endpoints.

        A started engine is paused as soon as it answers, because it must not answer requests from dummy weights. An
        engine that serves already goes on serving until all of this is done.
        """
        reading, meeting, starting = list(self._ranks), list(self._ranks), list(self._servers)
        layouts: tuple[DestLayout, ...] = ()
        attaching = {engine: in_daemon_thread(self._attach, engine, layouts) for engine in engines if not starting}
        endpoints: dict[ServedEngine, list[str]] = {}
        next_word = time.monotonic() + PROGRESS_S
        while reading or meeting:
            self._hear_ranks(reading, meeting, report)
            if starting and expected is not None and expected.done():
                layouts, expected = expected.result(), None
                if layouts:
                    report.expected_s = self._elapsed()
                    for rank in self._ranks:
                        rank.plan_for(layouts, len(engines))
            for server in list(starting):
                if not server.is_running:
                    raise server.why_it_ended()
                if server.engine.is_healthy():
                    server.engine.pause()
                    report.engines_up_s = self._elapsed()
                    starting.remove(server)
                    attaching[server.engine] = in_daemon_thread(self._attach, server.engine, layouts)
            if starting and self._elapsed() > self._options.start_timeout_s:
                late = starting[0]
                raise EngineError(f"{late.engine.url} is not up after {self._elapsed():.0f} s; see {late.log}")
            if not endpoints and not starting and all(attach.done() for attach in attaching.values()):
                endpoints = self._connect(engines, attaching, report)
            if time.monotonic() > next_word:
                next_word += PROGRESS_S
                self._say(len(starting))
            time.sleep(POLL_S)
        return endpoints

    def _hear_ranks(self, reading: list[RankProcess], meeting: list[RankProcess], report: PushReport) -> None:
        """Remove ranks that have read their share, or connected to the engines, from these lists."""
        for rank in self._ranks:
            match rank.result(0):
                case ("read", num_bytes, seconds, pinned):
                    reading.remove(rank)
                    report.num_bytes += num_bytes
                    report.pinned_bytes += pinned
                    report.read_s = max(report.read_s, seconds)
                    report.disk_done_s = self._elapsed()
                case ("connected", seconds):
                    meeting.remove(rank)
                    report.plan_s = max(report.plan_s, seconds.get("plan", 0.0))
                    report.connect_s = max(report.connect_s, seconds["connect"])
                    report.base_s = max(report.base_s, seconds.get("base", 0.0))
                case _:  # nothing yet
                    pass

    def _attach(self, engine: ServedEngine, layouts: Sequence[DestLayout]) -> tuple[list[str], float]:
        """Have an engine open its endpoints. Returns those of its ranks, and how many seconds that took."""
        options, began = self._options, time.monotonic()
        rendezvous = Rendezvous(self._key, local_host([engine]))
        try:
            endpoints = engine.attach(
                self._tensors,
                self._key,
                rendezvous,
                transport=options.transport,
                timeout_s=options.timeout_s,
                layouts=[layouts_digest((layout,)) for layout in layouts],
                landing_bytes=self._landing_bytes,
            )
        finally:
            rendezvous.close()
        return endpoints, time.monotonic() - began

    def _connect(
        self,
        engines: Sequence[ServedEngine],
        attaching: dict[ServedEngine, Future[tuple[list[str], float]]],
        report: PushReport,
    ) -> dict[ServedEngine, list[str]]:
        """All engines are attached: let the ranks connect to them, even while they read. Returns the endpoints."""
        attached = {engine: attaching[engine].result() for engine in engines}
        report.attached_s = self._elapsed()
        slowest = max(attached, key=lambda engine: attached[engine][1])
        rank = max(slowest.attached, key=lambda rank: sum(rank.seconds.values()))
        report.attach_s = {"whole": attached[slowest][1], **rank.seconds}
        report.num_engine_ranks = sum(len(engine.attached) for engine in engines)
        report.num_expected = sum(rank.is_expected for engine in engines for rank in engine.attached)
        for process in self._ranks:
            process.connect([address for addresses, _ in attached.values() for address in addresses])
        return {engine: addresses for engine, (addresses, _) in attached.items()}

    def _publish(self, endpoints: dict[ServedEngine, list[str]], report: PushReport) -> None:
        """Pause, send to all ranks of all engines at once, then resume the engines whose ranks all committed."""
        started: list[ServedEngine] = []
        may_be_written = False

        def end(error: BaseException) -> None:
            for engine in started:
                (engine.abandon if may_be_written else engine.undo)(in_words(error))

        with undone_by(end):
            for engine in endpoints:
                engine.start()
                started.append(engine)
            may_be_written = True
            for rank in self._ranks:
                rank.publish()
            _, published, report.link = self._results()[0]
        report.publish, report.publish_s = asdict(published), published.total_s
        failed = {replica.endpoint: replica.error for replica in published.replicas if not replica.committed}
        for engine, addresses in endpoints.items():
            errors = [f"rank {number}: {failed[a]}" for number, a in enumerate(addresses) if a in failed]
            report.engines[engine.url] = "; ".join(errors) or _finish(engine)
            if report.engines[engine.url]:
                engine.abandon(report.engines[engine.url])
        report.serving_s = self._elapsed()

    def _results(self) -> list[Any]:
        """Every rank's last report; the first error of any rank."""
        waiting, found = list(self._ranks), list[Any]()
        while waiting:
            for rank in list(waiting):
                if (answer := rank.result(POLL_S)) is not None:
                    found.append(answer)
                    waiting.remove(rank)
        return found

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _say(self, num_starting: int) -> None:
        """How far it is: when that has changed, and now and then."""
        read = sum(rank.num_bytes_read for rank in self._ranks) / 1e9
        said = f"read {read:.2f} GB" if read else "readers start"
        if self._servers:
            said += f", engines up {len(self._servers) - num_starting} of {len(self._servers)}"
        now_s = self._elapsed()
        if said != self._said or now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said, self._said_at_s = said, now_s
            sys.stderr.write(f"{now_s:6.1f} s  {said}\n")


def run_push(options: PushOptions, *, as_json: bool, stay: bool) -> None:
    """Run the command: push, print the report, and wait while engines that were started here run.

    Raises:
        ConfigError, PushError, EngineError: See Push.
    """
    with Push(options) as push:
        report = push.run()
        sys.stdout.write((json.dumps(asdict(report)) if as_json else describe(report)) + "\n")
        sys.stdout.flush()
        check_all_serve(report)
        if options.start and stay:
            push.watch()


def _check_is_base(base: Path, tensors: Sequence[TensorMeta]) -> None:
    """Refuse a base that is no checkpoint of the same model."""
    if difference := first_difference(tensors, tensor_metas(read_index(base, "--base"))):
        raise ConfigError(
            f"--base={base} is of another model than CHECKPOINT ({difference}); give what the engines hold, or leave "
            "--base out to send every byte"
        )


def _finish(engine: ServedEngine) -> str:
    """Let an engine serve. Returns why it does not; the other engines are finished, too."""
    try:
        engine.finish()
    except EngineError as e:
        return str(e)
    return ""
