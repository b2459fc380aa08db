"""Live vLLM workers killed and stopped in the middle of a publish, restarted, and filled from each other.

    python -m pytest -s tests/gpu/test_faults_gpu.py          two GPUs, three to four minutes

Every figure is printed with the second in which it was known, and kept in bench/results/faults-gpu.json at once: a time
limit loses what comes after it. The cases follow each other on one pair of engines, the most important one first.

GPU 0: the trainer (this process) and a small engine, the healthy replica. GPU 1: the victim, an engine that takes
so much of its GPU that a link which still maps its dead predecessor's weights makes it fail or lose KV blocks. Its
successors have imported vLLM before they are needed. Recovery reads GPU 0 -> GPU 1. Without GPUs the same runs at a
tiny size over TCP, and shows all but the figures.
"""

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

from bench.environment import environment
from slipstream.conf.schema import (
    Device,
    DType,
    LoraConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.recovery import Offer

pytestmark = pytest.mark.gpu

BEGAN = time.monotonic()
IS_GPU = os.environ.setdefault("SLIPSTREAM_FAULTS_ON_GPUS", str(torch.cuda.device_count() >= 2)) == "True"
"""Decided by the test's process, for all: an engine's process imports this module, too, and sees one GPU."""
ENVIRONMENT = environment(os.environ.get("SLIPSTREAM_COMMIT"))
DEVICE = "cuda" if IS_GPU else "cpu"
DTYPE = DType.bfloat16 if IS_GPU else DType.float32
KEY = b"slipstream-gpu-faults-test-key--"
SYNC = WeightSyncConfig(timeout_s=10.0 if IS_GPU else 5.0, watermark_bytes=(1 << 30) if IS_GPU else (1 << 22))
START_TIMEOUT_S = 120
ANSWER_TIMEOUT_S = 60
OTHERS_WAIT_S = 1.0 if IS_GPU else 4 * SYNC.timeout_s
"""A device takes writes to a stopped process's memory; a TCP peer that is stopped stalls the load that it shares."""
HEALTHY, VICTIM = 0, 1
UTILIZATION = {HEALTHY: 0.4, VICTIM: 0.95}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936 if IS_GPU else 128,
    "hidden_size": 2048 if IS_GPU else 64,
    "num_hidden_layers": 8 if IS_GPU else 2,  # 11 GB: 8 % of a GPU
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
    """A rollout worker that starts when it is told to, and obeys (method, arguments) until it is ended."""
    from slipstream.rollout.engine.engine_options import engine_environment

    # Spawned, because this process has asked for CUDA (above), which spoils a fork.
    os.environ.update(engine_environment(Device(DEVICE)) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    import vllm.v1.engine.async_llm  # noqa: F401  17 s on a GPU's host

    pipe.recv()
    asyncio.run(serve(utilization, folder, pipe))


async def serve(utilization: float, folder: str, pipe: Connection) -> None:
    from fakes.readable_engine import ReadableEngine

    from slipstream.conf.architecture.families import read_config
    from slipstream.rollout.types import Prompt, WorkerOptions
    from slipstream.rollout.worker import RolloutWorker

    options = WorkerOptions(
        folder=Path(folder), weight_sync=SYNC, dtype=DTYPE, device=DEVICE, key=KEY,
        tensors=read_config(CONFIG).checkpoint_tensors(str(DTYPE)),
        config=RolloutConfig(
            max_model_len=512, max_num_seqs=32, gpu_memory_utilization=utilization, enforce_eager=True,
            sampling=SamplingConfig(max_tokens=16, stop_at_eos=False),
        ),
    )  # fmt: skip
    worker = RolloutWorker(options, seed=0, make_engine=ReadableEngine)
    pipe.send(await worker.start())
    while True:
        method, *args = await asyncio.to_thread(pipe.recv)
        try:
            if method == "num_kv_blocks":
                pipe.send(worker.engine.num_kv_blocks)
            elif method == "digests":
                pipe.send((await worker.engine.call_ranks("read_params"))[0])
            elif method == "sample":
                pipe.send(await worker.generate_group(Prompt(0, (1, 2, 3, 4), ""), 4))
            else:
                pipe.send(await getattr(worker, method)(*args))
        except Exception as e:  # noqa: BLE001 - the test's process decides what it means
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

    def send(self, *message: object) -> None:
        """An order; its answer is fetched with get()."""
        self._pipe.send(message)

    def get(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        assert self._pipe.poll(timeout_s), f"no answer within {timeout_s} s"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, *message: object) -> Any:
        self.send(*message)
        return self.get()

    @property
    def core(self) -> psutil.Process:
        """The process with the model in it."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return next(process for process in tree if any("EngineCor" in word for word in process.cmdline()))

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
    successors: list[EngineProcess]
    """Engines that take the victim's place, not started yet."""
    publisher: Publisher
    transport: StrikingTransport
    decoder: Any
    version: int = -1
    normal_pause_s: float = 0.0
    passed_on: Sequence[Offer] = ()
    """What the healthy engine read from the victim last, over a link that is still open."""
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        """Print a figure and keep it, now: what comes after it may not be reached."""
        self.figures[name] = value
        print(f"\n[{time.monotonic() - BEGAN:6.1f} s]  {name:<60} {value:10.4f}", flush=True)
        if IS_GPU:
            file = Path(__file__).parents[2] / "bench" / "results" / "faults-gpu.json"
            file.write_text(json.dumps({"environment": ENVIRONMENT, **self.figures}, indent=2) + "\n")

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

    def assert_same_weights(self) -> None:
        """Byte for byte, in both engines."""
        for engine in self.engines:
            engine.send("digests")
        mine, theirs = (engine.get() for engine in self.engines)
        assert len(mine) > 10
        assert mine == theirs, [name for name in mine if mine[name] != theirs.get(name)]

    def assert_samples(self, number: int) -> None:
        """An engine's responses are of the newest version."""
        rollouts = self.engines[number].ask("sample")
        assert all(set(rollout.policy_versions) == {self.version} for rollout in rollouts)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.delivery.merged_source import TrainerWeightSource
    from slipstream.trainer.model.build_decoder import build_decoder
    from slipstream.weight_sync.transport.mooncake import MooncakeTransport

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_character_tokenizer(folder, vocab_size=64)
        started = [EngineProcess(number, folder) for number in (HEALTHY, VICTIM, VICTIM, VICTIM)]
        engines, successors = started[:2], started[2:]
        try:
            for engine in engines:
                engine.send("start")
            decoder = build_decoder(
                read_config(CONFIG), dtype=getattr(torch, DTYPE.value),
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
            made = Stage(engines, successors, publisher, transport, decoder)
            made.note("both engines up, s", time.monotonic() - BEGAN)
            reports = [made.publish() for _ in range(4)]
            assert all(report.num_committed == 2 for report in reports), [report.replicas for report in reports]
            made.normal_pause_s = statistics.median(report.replicas[HEALTHY].pause_s for report in reports[1:])
            made.note("normal publish to both, median of 3, s", statistics.median(one.total_s for one in reports[1:]))
            made.note("normal pause of the healthy engine, median of 3, s", made.normal_pause_s)
            yield made
            publisher.close()
            transport.close()
        finally:
            for engine in (*engines, *started):  # those of a case that was interrupted, too
                engine.kill()


def lose_the_victim(stage: Stage, signum: signal.Signals) -> None:
    """It gets the signal between two writes of a publish. The other engine commits and serves that version."""
    name, victim = signum.name, stage.engines[VICTIM]
    (offer,) = victim.ask("offer")
    stage.transport.strike = (offer.binding.session, victim.core, signum)
    report = stage.publish()
    assert stage.transport.strike is None, "the signal was sent between two writes"
    assert [replica.committed for replica in report.replicas] == [True, False], report.replicas
    pause_s = report.replicas[HEALTHY].pause_s
    stage.note(f"{name}: pause of the other, over a normal one, s", pause_s - stage.normal_pause_s)
    stage.note(f"{name}: publish over for the trainer, s", report.total_s)
    assert pause_s <= stage.normal_pause_s + OTHERS_WAIT_S, "it waited for the victim"
    stage.assert_samples(HEALTHY)


def start_again(stage: Stage, name: str, num_blocks: int) -> str:
    """The victim's successor finds the memory that its predecessor had. Returns its endpoint."""
    stage.engines[VICTIM].kill()
    if stage.passed_on:
        stage.engines[HEALTHY].ask("release", stage.passed_on)
        stage.passed_on = ()
    began = time.monotonic()
    successor = stage.engines[VICTIM] = stage.successors.pop()
    successor.send("start")
    endpoint = successor.get(START_TIMEOUT_S)
    stage.note(f"{name}: started again, s", time.monotonic() - began)
    share = successor.ask("num_kv_blocks") / num_blocks
    stage.note(f"{name}: KV blocks found again, share", share)
    assert share >= 0.98
    return endpoint


def recover_from_the_peer(stage: Stage, name: str, endpoint: str) -> None:
    """The successor reads the other engine's memory, serves its version, and takes part in the next publish."""
    peer, successor = stage.engines
    offers = peer.ask("offer")
    pulled = successor.ask("pull", offers)
    assert peer.ask("offer") == offers
    successor.ask("adopt", offers[0].version, offers[0].epoch)
    stage.note(f"{name}: recovery, {pulled.num_bytes / 1e9:.1f} GB over {offers[0].link}, s", pulled.read_s)
    stage.note(f"{name}: recovery, GB/s", pulled.num_bytes / pulled.read_s / 1e9)
    stage.note(f"{name}: recovery, proof, s", pulled.verify_s)
    successor.ask("release", offers)
    stage.assert_same_weights()
    stage.assert_samples(VICTIM)

    stage.publisher.reconnect(VICTIM, endpoint)
    report = stage.publish()
    assert report.num_committed == 2, report.replicas
    stage.note(f"{name}: publish with both again, s", report.total_s)


def test_a_worker_killed_mid_publish_costs_itself_and_comes_back_whole_from_its_peer(stage: Stage) -> None:
    num_blocks = stage.engines[VICTIM].ask("num_kv_blocks")
    assert num_blocks > 0
    lose_the_victim(stage, signal.SIGKILL)
    recover_from_the_peer(stage, "SIGKILL", start_again(stage, "SIGKILL", num_blocks))


def test_a_peer_passes_versions_on_over_one_link(stage: Stage) -> None:
    """weight_sync.relay=node, call by call: the victim is written, the other one reads from it."""
    reader, primary = stage.engines[HEALTHY], stage.engines[VICTIM]
    written_s, read_s, passed_s = [], [], []
    for _ in range(4):
        report = stage.publish(exclude=[HEALTHY])
        assert [replica.committed for replica in report.replicas] == [False, True], report.replicas
        began = time.monotonic()
        offers = primary.ask("offer")
        pulled = reader.ask("pull", offers)
        assert primary.ask("offer") == offers
        reader.ask("adopt", offers[0].version, offers[0].epoch)
        stage.passed_on = offers
        passed_s.append(time.monotonic() - began)
        written_s.append(report.total_s)
        read_s.append(pulled.read_s)
        stage.assert_samples(HEALTHY)
    stage.note("relay: written to one, median of 3, s", statistics.median(written_s[1:]))
    stage.note("relay: passed on, pause to commit, median of 3, s", statistics.median(passed_s[1:]))
    stage.note(
        f"relay: of it reading {pulled.num_bytes / 1e9:.1f} GB over {offers[0].link}, s", statistics.median(read_s[1:])
    )
    stage.assert_same_weights()


def test_a_worker_stopped_mid_publish_costs_itself_and_its_death_leaves_nothing_mapped(stage: Stage) -> None:
    """Nothing on the trainer's link, nor on that of an engine that reads from it."""
    num_blocks = stage.engines[VICTIM].ask("num_kv_blocks")
    lose_the_victim(stage, signal.SIGSTOP)
    recover_from_the_peer(stage, "SIGSTOP", start_again(stage, "SIGSTOP", num_blocks))
    stage.assert_same_weights()
