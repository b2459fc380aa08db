"""How tests start the ranks of a world.

Each rank is forked from one server per test process that has imported torch and the trainer once: the imports take
longer than most cases.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# By this name: the server of Python 3.11 looks in PYTHONPATH alone, and says nothing of what it does not find.
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.cases.preloaded"])


def run_processes(work: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """work(rank, *arguments) on each rank; the first error of any ends all and is raised."""
    mp.start_processes(work, args=arguments, nprocs=num_ranks, start_method="forkserver")
