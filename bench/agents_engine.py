"""What episodes cost beside a real engine: its tokens/s through the endpoint, and by its own call.

    python bench/agents_engine.py                                      half of Qwen3-30B-A3B, a GPU, no checkpoint
    python bench/agents_engine.py --tiny --episodes 1000 --tokens 16   two small layers, for a CPU

The engine has dummy weights. In both ways --episodes conversations are always open; one that ends makes room for
another. A turn samples between half and one and a half times --tokens.
direct: each conversation calls the engine, in this process, with lists of token ids that need no work. episodes: the
same turns by agents in their process, over HTTP, the service, the chat template and the tokenizer. Both take turns
--rounds times; each is measured for --seconds after --settle-s.

tokens/s are those that the engine sampled. busy: the share of time in which it had a request. waiting: conversations
that were not in the engine. added: seconds of a turn beyond the engine's, which is what a client waits for us.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import psutil  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from bench.agents import processes_of, usage  # noqa: E402
from bench.environment import environment  # noqa: E402
from bench.shapes import add_shape_options, model_config, shrink  # noqa: E402
from slipstream.conf.schema import Device, DType, EpisodesConfig, RolloutConfig, RunConfig, SamplingConfig  # noqa: E402
from slipstream.rollout.agents.episode_runner import EpisodeRunner  # noqa: E402
from slipstream.rollout.types import Prompt, Rollout  # noqa: E402

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


async def talk(task: dict[str, Any], session: Any) -> float:
    """A conversation of random lengths. Returns the mean seconds of a turn."""
    draw = random.Random()
    messages = [{"role": "user", "content": task["prompt"]}]
    began = time.monotonic()
    for _ in range(task["turns"]):
        reply = await session.chat(messages, max_tokens=_length(draw, task["tokens"]))
        messages += [reply.message, {"role": "user", "content": task["prompt"]}]
    return (time.monotonic() - began) / task["turns"]


def _length(draw: random.Random, tokens: int) -> int:
    return draw.randint(tokens // 2, tokens + tokens // 2)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE in which every id up to `vocab_size` is a text: bytes, pairs and triples, two specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(alphabet)
    merges: list[tuple[str, str]] = []
    pairs = ((one, other) for one, other in itertools.product(alphabet, alphabet))
    triples = ((one + other, third) for one, other, third in itertools.product(alphabet, alphabet, alphabet))
    for left, right in itertools.islice(itertools.chain(pairs, triples), vocab_size - len(SPECIAL) - len(alphabet)):
        merges.append((left, right))
        words.append(left + right)
    tokenizer: Any = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(description))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))


@dataclass
class Meter:
    """The engine's call, and what of it was in flight when."""

    call: Callable[[Prompt, SamplingConfig], Awaitable[Rollout]]
    num_in_flight: int = 0
    at: float = 0.0
    since: float = 0.0
    busy_s: float = 0.0
    request_s: float = 0.0
    """Sum over requests of the seconds in the engine."""
    turns_s: list[float] = field(default_factory=list[float])

    async def generate(self, prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        """One turn in the engine."""
        began = time.monotonic()
        self.move(1)
        try:
            return await self.call(prompt, sampling)
        finally:
            self.move(-1)
            self.turns_s.append(time.monotonic() - began)

    def move(self, change: int = 0) -> None:
        """Add up the time since the last change."""
        now = time.monotonic()
        self.busy_s += (now - self.at) * (self.num_in_flight > 0)
        self.request_s += (now - self.at) * self.num_in_flight
        self.at, self.num_in_flight = now, self.num_in_flight + change

    def begin(self) -> None:
        """Begin to measure."""
        self.move()
        self.since, self.busy_s, self.request_s, self.turns_s = self.at, 0.0, 0.0, []


class Ways:
    """The two ways to hold a conversation."""

    def __init__(self, args: argparse.Namespace, runner: EpisodeRunner, meter: Meter, folder: Path) -> None:
        self._args = args
        self._runner = runner
        self._meter = meter
        self._encode: Callable[[str], Any] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
        self._draw = random.Random(0)
        self.episode_turns_s: list[float] = []
        self.failures: list[str] = []

    async def episodes(self) -> None:
        """By an agent."""
        prompt = Prompt(0, (), self._prompt(), {"turns": self._args.turns, "tokens": self._args.tokens})
        (episode,) = await self._runner.run_group(prompt, 1)
        if episode.reward is None:
            self.failures.append(episode.rollout.failure)
        else:
            self.episode_turns_s.append(episode.reward)

    async def direct(self) -> None:
        """By the engine's own call."""
        text = self._prompt()
        first = self._ids(f"{SPECIAL[0]}user\n{text}{SPECIAL[1]}\n{SPECIAL[0]}assistant\n")
        between = self._ids(f"{SPECIAL[1]}\n{SPECIAL[0]}user\n{text}{SPECIAL[1]}\n{SPECIAL[0]}assistant\n")
        tokens = first
        for _ in range(self._args.turns):
            sampling = SamplingConfig(max_tokens=_length(self._draw, self._args.tokens), stop_at_eos=False)
            rollout = await self._meter.generate(Prompt(0, tuple(tokens), ""), sampling)
            tokens = [*tokens, *rollout.token_ids, *between]

    def _prompt(self) -> str:
        return "".join(self._draw.choices("abcdefghijklmnopqrstuvwxyz ", k=self._args.prompt_characters))

    def _ids(self, text: str) -> list[int]:
        return self._encode(text).ids


@contextlib.asynccontextmanager
async def always(num: int, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Have `num` of these at any time."""

    async def again() -> None:
        while True:
            await work()

    tasks = [asyncio.create_task(again()) for _ in range(num)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_way(args: argparse.Namespace, ways: Ways, meter: Meter, engine: Any, name: str) -> dict[str, Any]:
    """One round of one way."""
    ways.episode_turns_s.clear()
    async with always(args.episodes, getattr(ways, name)):
        await asyncio.sleep(args.settle_s)
        processes = processes_of()
        before = {one: usage(process) for one, process in processes.items()}
        meter.begin()
        ways.episode_turns_s.clear()
        tokens = engine.num_generated_tokens
        await asyncio.sleep(args.seconds)
        meter.move()
        seconds, tokens = meter.at - meter.since, engine.num_generated_tokens - tokens
        turns_s = ways.episode_turns_s if name == "episodes" else meter.turns_s
        after = {one: usage(process) for one, process in processes.items()}
        found = {
            "tokens_per_s": tokens / seconds,
            "turns": len(meter.turns_s),
            "busy": meter.busy_s / seconds,
            "waiting": args.episodes - meter.request_s / seconds,
            "engine_turn_s": statistics.mean(meter.turns_s) if meter.turns_s else None,
            "turn_s": statistics.mean(turns_s) if turns_s else None,
            "cpu_share": {one: (after[one]["cpu_s"] - before[one]["cpu_s"]) / seconds for one in processes},
            "unique_mb": {one: after[one]["unique_mb"] for one in processes},
        }
    while meter.num_in_flight:
        await asyncio.sleep(0.1)
    return found


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds."""
    from slipstream.rollout.engine.vllm_engine import VllmEngine

    (folder / "config.json").write_text(json.dumps(model_config(args)))
    save_tokenizer(folder, args.vocab)
    sampling = SamplingConfig(max_tokens=2 * args.tokens, stop_at_eos=False)
    rollout = RolloutConfig(
        agent="bench.agents_engine:talk",
        sampling=sampling,
        max_model_len=args.turns * (2 * args.tokens + args.prompt_characters + 32),
        max_num_seqs=args.episodes,
        enforce_eager=args.eager,
        episodes=EpisodesConfig(max_turns=args.turns, timeout_s=3600, num_processes=args.processes),
    )
    is_gpu = args.device is Device.cuda
    dtype = DType.bfloat16 if is_gpu else DType.float32
    engine = VllmEngine(folder, rollout, dtype=dtype, device=args.device, seed=1)
    runner = EpisodeRunner(RunConfig(rollout=rollout), folder, log_path=folder / "agents.log")
    began = time.monotonic()
    try:
        await asyncio.gather(engine.start(), runner.start())
        engine.version = 0
        await engine.warm_up()
        print(f"the engine started in {time.monotonic() - began:.0f} s", flush=True)

        async def call(prompt: Prompt, sampling: SamplingConfig) -> Rollout:
            (only,) = await engine.generate_group(prompt.token_ids, 1, sampling)
            return only

        meter = Meter(call)
        runner.sample_with(meter.generate)
        ways = Ways(args, runner, meter, folder)
        await ways.episodes()  # loads the chat template
        rounds: dict[str, list[dict[str, Any]]] = {"direct": [], "episodes": []}
        for _ in range(args.rounds):
            for name, found in rounds.items():
                found.append(await measure_way(args, ways, meter, engine, name))
                print(name, json.dumps(found[-1]), flush=True)
    finally:
        await runner.close()
        engine.shutdown()
    direct, episodes = (statistics.median(one["tokens_per_s"] for one in found) for found in rounds.values())
    return {"overhead": 1 - episodes / direct, "failures": ways.failures, "rounds": rounds}


def print_table(found: dict[str, Any]) -> None:
    """Medians over rounds."""
    print(f"\n{'':<10}{'tokens/s':>12}{'range':>20}{'busy':>8}{'waiting':>9}{'turn s':>9}{'of which added':>16}")
    for name, rounds in found["rounds"].items():
        rates = [one["tokens_per_s"] for one in rounds]
        middle = {key: statistics.median(one[key] or 0.0 for one in rounds) for key in ("busy", "waiting", "turn_s")}
        added = statistics.median((one["turn_s"] or 0.0) - (one["engine_turn_s"] or 0.0) for one in rounds)
        print(
            f"{name:<10}{statistics.median(rates):>12,.0f}{f'{min(rates):,.0f}-{max(rates):,.0f}':>20}"
            f"{middle['busy']:>8.1%}{middle['waiting']:>9.1f}{middle['turn_s']:>9.3f}{added:>16.4f}"
        )
    print(f"cost of the endpoint: {found['overhead']:.1%} of the engine's tokens/s; {len(found['failures'])} failures")


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser, rank=8)
    parser.set_defaults(layers=24)
    parser.add_argument("--tiny", action="store_true", help="two small layers")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="sampled per turn, on average")
    parser.add_argument("--prompt-characters", type=int, default=400)
    parser.add_argument("--processes", type=int, default=1, help="that run agents")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--commit", help="of a tree that is not a git checkout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        shrink(args)
        args.head_dim = 32  # the smallest of vLLM's attention on a CPU
    facts = environment(args.commit)
    args.device = Device.cuda if facts["gpus"] else Device.cpu
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    out = args.out or ROOT / "bench" / "results" / f"agents_engine-{'gpu' if facts['gpus'] else 'cpu'}.json"
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    options = {name: str(value) for name, value in vars(args).items() if name != "out"}
    report = {"environment": facts, "load": psutil.getloadavg(), "options": options, **found}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(found)
    print(f"written: {out}")


if __name__ == "__main__":
    main()
