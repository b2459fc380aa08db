"""Runs episodes of any `verifiers` 0.4 environment. It needs verifiers and nothing of Slipstream.

    python worker.py TASKSET --rows > tasks.jsonl    a row for each task, for Slipstream's data.path
    python worker.py TASKSET                         lines on standard input -> lines on standard output, many at once:
        {"episode": 7, "idx": 3, "base_url": ..., "api_key": ..., "model": ...} -> {"episode": 7, "reward": 0.67}

TASKSET is what `--env.taskset.id` of verifiers is: an installed module, or one on PYTHONPATH. agent.py starts this in
the interpreter of verifiers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from typing import Any

import verifiers.v1 as vf


async def run(env: vf.Env[Any], tasks: dict[int, vf.Task[Any]], order: dict[str, Any]) -> dict[str, Any]:
    """One episode against Slipstream's endpoint. Returns its reward, or what went wrong."""
    variable = f"SLIPSTREAM_KEY_{order['episode']}"  # verifiers reads a key from a variable; every episode has its own
    os.environ[variable] = order["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
        context = vf.ModelContext(model=order["model"], client=client)
        episode = await env.run_episode(tasks[order["idx"]], context)
        if not episode.ok:
            errors = [error for one in (episode, *episode.traces) for error in one.errors]
            return {"episode": order["episode"], "error": "; ".join(f"{e.type}: {e.message}" for e in errors)}
        return {"episode": order["episode"], "reward": sum(trace.reward for trace in episode.traces)}
    except Exception:  # noqa: BLE001 - an environment's own code may raise anything
        return {"episode": order["episode"], "error": traceback.format_exc()}
    finally:
        del os.environ[variable]


async def serve(env: vf.Env[Any], tasks: dict[int, vf.Task[Any]]) -> None:
    """Answer until standard input has ended and all episodes have."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an environment prints is no answer
    running: set[asyncio.Task[None]] = set()

    async def one(order: dict[str, Any]) -> None:
        answers.write(json.dumps(await run(env, tasks, order)) + "\n")

    async with env.serving():
        while line := await reader.readline():
            task = asyncio.create_task(one(json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset")
    parser.add_argument("--rows", action="store_true")
    args = parser.parse_args()
    config = {"taskset": {"id": args.taskset}, "agent": {"runtime": {"type": "subprocess"}}}
    env = vf.load_environment(vf.resolve_env_config(config))
    tasks = {task.data.idx: task for task in env.taskset}
    if args.rows:
        for number, task in tasks.items():
            sys.stdout.write(json.dumps({"prompt": task.data.prompt_text or str(number), "idx": number}) + "\n")
        return
    asyncio.run(serve(env, tasks))


if __name__ == "__main__":
    main()
