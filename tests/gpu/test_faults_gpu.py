"""Live vLLM workers killed and stopped in the middle of a publish, restarted, and filled from each other.

    python -m pytest -s tests/gpu/test_faults_gpu.py          two GPUs, about two minutes; prints a table

GPU 0: the trainer (this process) and a small engine, the healthy replica. GPU 1: the victim, an engine that takes
nearly all of its GPU, so that a link which still maps its dead predecessor's weights makes it fail or lose KV blocks.
Recovery reads GPU 0 -> GPU 1. Without GPUs the same runs at a tiny size over TCP, and shows all but the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from conf.schema import Device, DType, LoraConfig, RolloutConfig, SamplingConfig, TrainerConfig, WeightSyncConfig
from weight_sync.publish_report import PublishReport
from weight_sync.publisher import Publisher

pytestmark = pytest.mark.gpu

IS_GPU = os.environ.setdefault("SLIPSTREAM_FAULTS_ON_GPUS", str(torch.cuda.device_count() >= 2)) == "True"
"""Decided by the test's process, for all: an engine's process imports this module, too, and sees one GPU."""
DEVICE = "cuda" if IS_GPU else "cpu"
DTYPE = DType.bfloat16 if IS_GPU else DType.float32
KEY = b"slipstream-gpu-faults-test-key--"
SYNC = WeightSyncConfig(timeout_s=10.0 if IS_GPU else 5.0, watermark_bytes=(1 << 30) if IS_GPU else (1 << 22))
START_TIMEOUT_S = 150
ANSWER_TIMEOUT_S = 90
HEALTHY, VICTIM = 0, 1
UTILIZATION = {HEALTHY: 0.4, VICTIM: 0.92}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936 if IS_GPU else 128,
    "hidden_size": 2048 if IS_GPU else 64,
    "num_hidden_layers": 12 if IS_GPU else 2,  # 16 GB
    "num_attention_heads": 32 if IS_GPU else 4,
    "num_key_value_heads": 4 if IS_GPU else 2,
    "head_dim": 128 if IS_GPU else 32,
    "intermediate_size": 6144 if IS_GPU else 64,
    "moe_intermediate_size": 768 if IS_GPU else 32,
    "num_experts": 128 if IS_GPU else 4,
    "num_experts_per_tok": 8 if IS_GPU else 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": str(DTYPE),
    "bos_token_id": 0,
    "eos_token_id": 0,
}


# ---- an engine's process ----


def run_engine(utilization: float, folder: str, pipe: Connection) -> None:
    """A rollout worker that obeys (method, arguments) until it is ended."""
    asyncio.run(serve(utilization, folder, pipe))


async def serve(utilization: float, folder: str, pipe: Connection) -> None:
    from rollout.engine import engine_environment
    from rollout.types import Prompt
    from rollout.worker import RolloutWorker
    from trainer.model.spec import ModelSpec

    # Spawned, because this process has asked for CUDA (above), which spoils a fork.
    os.environ.update(engine_environment(Device(DEVICE)) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    worker = RolloutWorker(
        Path(folder),
        config=RolloutConfig(
            max_model_len=512,
            max_num_seqs=32,
            gpu_memory_utilization=utilization,
            enforce_eager=True,
            sampling=SamplingConfig(max_tokens=16, stop_at_eos=False),
        ),
        weight_sync=SYNC,
        dtype=DTYPE,
        device=DEVICE,
        seed=0,
        tensors=ModelSpec.from_hf_config(CONFIG).checkpoint_tensors(str(DTYPE)),
        key=KEY,
    )
    pipe.send(await worker.start())
    while True:
        method, *args = await asyncio.to_thread(pipe.recv)
        try:
            if method == "health":
                pipe.send(worker.health())
            elif method == "digests":
                pipe.send((await worker._engine.call_ranks("slipstream_read_params"))[0])
            elif method == "sample":
                pipe.send(await worker.generate_group(Prompt(0, (1, 2, 3, 4), ""), 4))
            else:
                pipe.send(await getattr(worker, method)(*args))
        except Exception as e:  # the test's process decides what it means
            pipe.send(e)


GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")


class EngineProcess:
    """One replica, seeing one GPU."""

    def __init__(self, number: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[number]  # the child's; no process of a run sees a GPU of another one
        self.process = context.Process(target=run_engine, args=(UTILIZATION[number], str(folder), theirs))
        self.process.start()
        os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[0]  # this process's: CUDA is first used after this
        theirs.close()

    def get(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        assert self._pipe.poll(timeout_s), f"no answer within {timeout_s} s"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *message: object) -> Any:
        self._pipe.send(message)
        return self.get()

    @property
    def core(self) -> psutil.Process:
        """The process with the model in it."""
        return next(p for p in psutil.Process(self.process.pid).children(recursive=True) if "EngineCor" in p.name())

    def kill(self) -> None:
        """All of it, stopped processes too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            victims = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            psutil.wait_procs(victims, timeout=20)
        self.process.join(20)


# ---- the trainer's side ----


class StrikingTransport:
    """The real link; after the first write to the victim it sends the victim's engine a signal, once."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.strike: tuple[str, psutil.Process, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(
        self, session: str, src: Sequence[int], dst: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        self._inner.write(session, src, dst, sizes, timeout_s=timeout_s)
        if self.strike is not None and self.strike[0] == session:
            _, process, signum = self.strike
            self.strike = None
            process.send_signal(signum)


@dataclass
class Stage:
    """Trainer and both replicas."""

    engines: list[EngineProcess]
    publisher: Publisher
    transport: StrikingTransport
    decoder: Any
    folder: Path
    version: int = -1
    normal_pause_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    def publish(self, exclude: Sequence[int] = ()) -> PublishReport:
        """Another policy, everywhere but there."""
        self.version += 1
        with torch.no_grad():
            for name, parameter in self.decoder.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.02)
        if IS_GPU:
            torch.cuda.synchronize()
        return self.publisher.publish(self.version, exclude=exclude)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    from trainer.model.decoder import build_decoder
    from trainer.model.spec import ModelSpec
    from trainer.weight_source import TrainerWeightSource
    from weight_sync.transport.mooncake import MooncakeTransport

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        engines = [EngineProcess(number, folder) for number in (HEALTHY, VICTIM)]
        try:
            decoder = build_decoder(
                ModelSpec.from_hf_config(CONFIG), dtype=getattr(torch, DTYPE.value),
                device=DEVICE, trainer=TrainerConfig(lora=LoraConfig(rank=16, alpha=32.0)),
            )  # fmt: skip
            with torch.no_grad():
                for parameter in decoder.parameters():
                    parameter.normal_(0.0, 0.02)
            transport = StrikingTransport(MooncakeTransport(device=DEVICE, timeout_s=SYNC.timeout_s))
            publisher = Publisher(
                TrainerWeightSource(decoder, rank=0), transport, rank=0, world_size=1, group=None, config=SYNC, key=KEY,
                device=DEVICE,
            )  # fmt: skip
            publisher.connect([engine.get(START_TIMEOUT_S) for engine in engines])
            made = Stage(engines, publisher, transport, decoder, folder)
            reports = [made.publish() for _ in range(4)]
            assert all(report.num_committed == 2 for report in reports), [report.replicas for report in reports]
            made.normal_pause_s = statistics.median(report.replicas[HEALTHY].pause_s for report in reports[1:])
            made.figures["publish to both, median of 3 s"] = statistics.median(one.total_s for one in reports[1:])
            yield made
            publisher.close()
            transport.close()
            print("\n" + "\n".join(f"  {name:<52} {value:10.4f}" for name, value in made.figures.items()))
            if IS_GPU:
                figures = {"normal_pause_s": made.normal_pause_s, **made.figures}
                file = Path(__file__).parents[2] / "bench" / "results" / "faults-gpu.json"
                file.write_text(json.dumps(figures, indent=2) + "\n")
        finally:
            for engine in engines:
                engine.kill()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_mid_publish_costs_itself_and_comes_back_whole_from_its_peer(
    stage: Stage, signum: signal.Signals
) -> None:
    name = signum.name
    victim = stage.engines[VICTIM]
    num_blocks = victim.ask("health").num_kv_blocks
    assert num_blocks > 0
    (offer,) = victim.ask("offer")
    stage.transport.strike = (offer.binding.session, victim.core, signum)
    report = stage.publish()
    assert stage.transport.strike is None, "the signal was sent between two writes"
    assert [replica.committed for replica in report.replicas] == [True, False], report.replicas
    pause_s = report.replicas[HEALTHY].pause_s
    stage.figures[f"{name}: pause of the other (normal {stage.normal_pause_s:.3f}) s"] = pause_s
    # A device takes writes to a stopped process's memory; a TCP peer that is stopped stalls the load that it shares.
    assert pause_s <= stage.normal_pause_s + (3.0 if IS_GPU else 4 * SYNC.timeout_s), "it did not wait for the other"
    rollouts = stage.engines[HEALTHY].ask("sample")
    assert all(set(rollout.policy_versions) == {stage.version} for rollout in rollouts)

    victim.kill()
    successor = stage.engines[VICTIM] = EngineProcess(VICTIM, stage.folder)
    endpoint = successor.get(START_TIMEOUT_S)
    share = successor.ask("health").num_kv_blocks / num_blocks
    stage.figures[f"{name}: KV blocks found again (share)"] = share
    assert share >= 0.98

    offers = stage.engines[HEALTHY].ask("offer")
    pulled = successor.ask("pull", offers)
    assert stage.engines[HEALTHY].ask("offer") == offers
    successor.ask("adopt", offers[0].version, offers[0].epoch)
    stage.figures[f"{name}: recovery, {pulled.num_bytes / 1e9:.1f} GB over {offers[0].link} s"] = pulled.read_s
    stage.figures[f"{name}: recovery, GB/s"] = pulled.num_bytes / pulled.read_s / 1e9
    successor.ask("release", offers)
    stage.figures[f"{name}: recovery, proof s"] = pulled.verify_s
    digests = successor.ask("digests")
    assert len(digests) > 10
    assert digests == stage.engines[HEALTHY].ask("digests"), "byte for byte"
    assert all(set(rollout.policy_versions) == {stage.version} for rollout in successor.ask("sample"))

    stage.publisher.reconnect(VICTIM, endpoint)
    report = stage.publish()
    assert report.num_committed == 2, report.replicas
    stage.figures[f"{name}: publish with both again s"] = report.total_s
    assert successor.ask("digests") == stage.engines[HEALTHY].ask("digests")


def test_a_peer_passes_versions_on_over_one_link_and_its_death_leaves_nothing_mapped(stage: Stage) -> None:
    """weight_sync.relay=node, call by call: the victim is written, the other one reads from it."""
    reader, primary = stage.engines[HEALTHY], stage.engines[VICTIM]
    num_blocks = primary.ask("health").num_kv_blocks
    written_s, read_s, passed_s = [], [], []
    for _ in range(4):
        report = stage.publish(exclude=[HEALTHY])
        assert [replica.committed for replica in report.replicas] == [False, True], report.replicas
        began = time.monotonic()
        offers = primary.ask("offer")
        pulled = reader.ask("pull", offers)
        assert primary.ask("offer") == offers
        reader.ask("adopt", offers[0].version, offers[0].epoch)
        passed_s.append(time.monotonic() - began)
        written_s.append(report.total_s)
        read_s.append(pulled.read_s)
        assert reader.ask("digests") == primary.ask("digests"), "byte for byte"
        assert all(set(rollout.policy_versions) == {stage.version} for rollout in reader.ask("sample"))
    stage.figures["relay: written to one, median of 3 s"] = statistics.median(written_s[1:])
    stage.figures["relay: passed on, pause to commit, median of 3 s"] = statistics.median(passed_s[1:])
    stage.figures[f"relay: of it reading {pulled.num_bytes / 1e9:.1f} GB over {offers[0].link} s"] = statistics.median(
        read_s[1:]
    )

    primary.kill()
    report = stage.publish(exclude=[VICTIM])
    assert [replica.committed for replica in report.replicas] == [True, False], report.replicas
    reader.ask("release", offers)
    successor = stage.engines[VICTIM] = EngineProcess(VICTIM, stage.folder)
    endpoint = successor.get(START_TIMEOUT_S)
    share = successor.ask("health").num_kv_blocks / num_blocks
    stage.figures["relay: KV blocks found again (share)"] = share
    assert share >= 0.98
    stage.publisher.reconnect(VICTIM, endpoint)
    assert stage.publish().num_committed == 2
    assert successor.ask("digests") == reader.ask("digests")
