"""What the agents' side costs: CPU and memory of the service and of an agent process, and the latency that they add.

    python bench/agents.py --episodes 1000 --turns 3      about a minute on two cores

The service, HTTP, tokens and the agent's process are real; the engine answers after --engine-s without computing, so
what is left is ours. All episodes begin at once. CPU seconds are of whole processes while the episodes run.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import psutil  # noqa: E402

from bench.environment import environment  # noqa: E402
from slipstream.conf.schema import EpisodesConfig, RolloutConfig, RunConfig, SamplingConfig  # noqa: E402
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer  # noqa: E402
from slipstream.rollout.agents.episode_runner import EpisodeRunner  # noqa: E402
from slipstream.rollout.types import Prompt, Rollout  # noqa: E402


async def talk(task: dict[str, Any], session: Any) -> float:
    """Some turns of a conversation. Returns the mean seconds of one."""
    messages = [{"role": "user", "content": task["prompt"]}]
    began = time.monotonic()
    for _ in range(task["turns"]):
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": task["prompt"]}]
    return (time.monotonic() - began) / task["turns"]


def usage(process: psutil.Process) -> dict[str, float]:
    times = process.cpu_times()
    return {"cpu_s": times.user + times.system, "unique_mb": process.memory_full_info().uss / 1e6}


def processes_of() -> dict[str, psutil.Process]:
    """This one, the service and the agents' process, by their command lines."""
    found = {"controller": psutil.Process()}
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline()
        for name in ("service", "agent_process"):
            if f"slipstream.rollout.agents.{name}" in words and "-P" in words and "keeper.py" not in " ".join(words):
                found[name] = child
    return found


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All episodes at once."""
    save_character_tokenizer(folder, vocab_size=64)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    config = RunConfig(
        rollout=RolloutConfig(
            agent="bench.agents:talk",
            sampling=SamplingConfig(max_tokens=args.tokens),
            episodes=EpisodesConfig(max_turns=args.turns, timeout_s=3600),
        )
    )
    tokens = [5 + number % 26 for number in range(args.tokens)]

    async def generate(prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        await asyncio.sleep(args.engine_s)
        return Rollout(tokens, [-1.0] * len(tokens), [0] * len(tokens), "", "length")

    runner = EpisodeRunner(config, folder, log_path=folder / "agents.log")
    try:
        await runner.start()
        runner.sample_with(generate)
        prompt = Prompt(0, (1, 5), "x" * args.prompt_characters, {"turns": args.turns})
        await runner.run_group(prompt, 1)  # loads the chat template
        processes = processes_of()
        before = {name: usage(process) for name, process in processes.items()}
        began = time.monotonic()
        episodes = await runner.run_group(prompt, args.episodes)
        wall_s = time.monotonic() - began
        after = {name: usage(process) for name, process in processes.items()}
    finally:
        await runner.close()
    failed = [episode.rollout.failure for episode in episodes if episode.rollout.failure]
    turn_s = [episode.reward for episode in episodes if episode.reward is not None]
    num_turns = args.episodes * args.turns
    return {
        "failed": len(failed),
        "wall_s": wall_s,
        "turn_s_median": statistics.median(turn_s),
        "turn_s_max": max(turn_s),
        "cpu_ms_per_turn": {
            name: 1e3 * (after[name]["cpu_s"] - before[name]["cpu_s"]) / num_turns for name in processes
        },
        "unique_mb_before": {name: before[name]["unique_mb"] for name in processes},
        "unique_mb_after": {name: after[name]["unique_mb"] for name in processes},
    }


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="sampled per turn")
    parser.add_argument("--prompt-characters", type=int, default=200)
    parser.add_argument("--engine-s", type=float, default=1.0, help="seconds of the engine per turn")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "agents-cpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    options = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.write_text(json.dumps({"environment": environment(), "options": options, **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
