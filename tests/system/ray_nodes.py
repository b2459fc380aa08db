"""A Ray cluster of several nodes on one machine: node i listens on 127.0.0.(i + 2) alone. Run by test_ray_nodes.py.

    python ray_nodes.py TICKETS ...       tickets (hundredths of a CPU) that each node has left; the first is the head

Prints the cluster's address. Then reads lines: an address ends that node, all its processes at once, as a power cut
would; "join" adds a node, whose tickets are all left. The end of the input ends the rest.

A node that joins imports vLLM itself, as nodes of a cluster do; the others are given whoever imported it for the tests.
"""

import itertools
import os
import sys
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # more than one node on addresses of this machine
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.update(RAY_worker_niceness="0")  # as in a cluster of our own

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from slipstream.rollout.in_vllm.fork_server import BEGUN_VARIABLE


def main(tickets: list[int]) -> None:
    cluster = Cluster()
    addresses = (f"127.0.0.{number}" for number in itertools.count(2))

    def add(**environment: str) -> tuple[str, Any]:
        address = next(addresses)
        node = cluster.add_node(
            node_ip_address=address, num_cpus=1, object_store_memory=100 << 20, include_dashboard=False,
            no_monitor=True, include_log_monitor=False,  # two processes, which import Ray
            env_vars=environment,
        )  # fmt: skip
        return address, node

    nodes = dict(add() for _ in tickets)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    taken = [{"CPU": 1 - left / 100, f"node:{address}": 0.01} for address, left in zip(nodes, tickets, strict=True)]
    ray.get(placement_group(taken, lifetime="detached").ready())
    ray.shutdown()  # Ray would print to our output whatever becomes of a node
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "join":
                joined = dict([add(**{BEGUN_VARIABLE: ""})])
                nodes |= joined
                print(*joined, flush=True)
            else:
                nodes.pop(line.strip()).kill_all_processes(check_alive=False, allow_graceful=False)
                print("gone", flush=True)
    finally:
        for node in reversed(nodes.values()):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
