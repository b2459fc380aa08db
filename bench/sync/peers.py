"""Other ways to send the same weights into the same live engine, in the same run. If a peer fails, the output says why.

    vllm_nccl           vLLM's own NCCL weight transfer, packed, from trainer rank 0. Figure: pause, start, broadcast of
                        every checkpoint tensor, load_weights, finish, resume. Left out: gathering and merging (the
                        tensors are ready in rank 0's memory), any proof of the bytes.
    checkpoint_engine   checkpoint-engine, one parameter server per GPU of the engine, broadcast mode. Figure: pause,
                        host to device, broadcast among the servers, load_weights through IPC, post-processing, resume.
                        Left out: the trainer's gathering, merging and copy to the host (register_s is the copy into
                        pinned memory), any proof of the bytes.

Both send all tensors of the checkpoint, as many bytes as a publish. Values are taken from one pool of random numbers.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from bench.environment import version

TIMEOUT_S = 75.0


def tensors_of(hf_config: dict[str, Any]) -> tuple[list[str], list[list[int]]]:
    from slipstream.conf.architecture.families import read_config

    metas = read_config(hf_config).checkpoint_tensors("bfloat16")
    return [meta.name for meta in metas], [list(meta.shape) for meta in metas]


def answer(pipe: Connection, timeout_s: float = TIMEOUT_S) -> Any:
    """The next answer. Raises the error that it contains."""
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    reply = pipe.recv()
    if isinstance(reply, tuple) and len(reply) == 2 and (reply[0] is None or isinstance(reply[0], str)):
        error, reply = reply
        if error is not None:
            raise RuntimeError(error)
    if isinstance(reply, Exception):
        raise reply
    return reply


def vllm_nccl(hf_config: dict[str, Any], engine: Connection, rank0: Connection, tp_size: int, repeats: int) -> Any:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 1 + tp_size}
    engine.send(("nccl_init", info))
    rank0.send(("nccl_init", info))
    answer(rank0)
    answer(engine)
    names, shapes = tensors_of(hf_config)
    update = {"names": names, "shapes": shapes, "dtype_names": ["bfloat16"] * len(names), "packed": True}
    seconds = []
    for _ in range(1 + repeats):
        engine.send(("nccl_update", update))
        rank0.send(("nccl_send", names, shapes))
        seconds.append(answer(engine))
        answer(rank0)
    return {"seconds": seconds[1:], "median_s": statistics.median(seconds[1:])}


def checkpoint_engine(hf_config: dict[str, Any], engine: Connection, gpus: list[int], repeats: int) -> Any:
    context = multiprocessing.get_context("spawn")
    port = free_port()
    servers = []
    try:
        for rank, gpu in enumerate(gpus):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve_parameters, args=(hf_config, rank, len(gpus), gpu, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            servers.append((process, ours))
        register_s = max(answer(pipe, 2 * TIMEOUT_S) for _, pipe in servers)
        seconds = []
        for _ in range(1 + repeats):
            for _, pipe in servers:
                pipe.send("update")
            handles = answer(servers[0][1])  # rank 0 asks for the engine's part once all are ready
            engine.send(("ipc_update", handles))
            ready = wait([engine, *(process.sentinel for process, _ in servers)], timeout=TIMEOUT_S)
            if engine not in ready:
                raise RuntimeError(f"the update did not end: {len(ready)} parameter servers died")
            seconds.append(answer(engine))
            for _, pipe in servers:
                answer(pipe)
        return {
            "version": version("checkpoint-engine"),
            "seconds": seconds[1:],
            "median_s": statistics.median(seconds[1:]),
            "register_s": register_s,
        }
    finally:
        for process, _ in servers:
            process.kill()


def _serve_parameters(
    hf_config: dict[str, Any], rank: int, world_size: int, gpu: int, port: int, pipe: Connection
) -> None:
    """One parameter server: registers its share of the checkpoint, then updates when told."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    cast("dict[str, Any]", sys.modules)["mooncake.engine"] = None  # its P2P store needs a NIC; broadcast does not
    try:
        import torch
        from checkpoint_engine.ps import ParameterServer

        names, shapes = tensors_of(hf_config)
        largest = max(torch.Size(shape).numel() for shape in shapes)
        pool = torch.empty(largest, dtype=torch.bfloat16).normal_(0.0, 0.02)
        mine = {
            name: pool[: torch.Size(shape).numel()].view(shape)
            for index, (name, shape) in enumerate(zip(names, shapes, strict=True))
            if index % world_size == rank
        }
        server = ParameterServer(rank=rank or None, world_size=world_size, gpu_count=1, auto_pg=True)
        began = time.perf_counter()
        server.register_checkpoint("bench", named_tensors=mine)
        pipe.send(time.perf_counter() - began)

        def request(handles: list[tuple[str, str]]) -> None:
            if rank == 0:
                pipe.send(dict(handles))

        while pipe.recv() == "update":
            server.gather_metas("bench")
            server.update("bench", request)
            pipe.send((None, None))
    except Exception as e:  # noqa: BLE001 - the bench gets any error of this process as its answer
        pipe.send((f"{type(e).__name__}: {e}", None))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def attempt(name: str, pipes: list[Connection], work: Callable[[], Any]) -> dict[str, Any]:
    """A peer's figures, or why it has none. Drops late answers to an earlier peer."""
    try:
        for pipe in pipes:
            while pipe.poll(0):
                pipe.recv()
        return work()
    except Exception as e:  # noqa: BLE001 - whatever fails in a peer must not hide our rows
        print(f"{name} failed: {type(e).__name__}: {e}", flush=True)
        return {"failed": f"{type(e).__name__}: {e}"}
