"""A run whose nodes come and go, each a network namespace with a Ray node of its own: one, three, one.

    sudo python bench/nodes.py
    python bench/nodes.py --by-command    the same numbers of workers on this machine alone, by `slipstream scale`

The quick start's model with rollout.num_workers=1..3 on two CPU cores. A node has room for one worker, and the first
one for the trainer, too. Two nodes join while it trains. Then one is cut off for a few seconds, and one for longer, by
`slipstream chaos`; a lost one joins again. In the end one gets a notice (rollout.notice) just after a publish, with
which responses begin, and the other is gone at once, as in a power cut. Every step has an evaluation, whose responses
are greedy. The policy stands still (a learning rate of 1e-12): all of these must be those of an undisturbed run, token
by token. Writes bench/results/nodes-cpu.json (scale-cpu.json) with what was seen of each phase, and the checks of
chaos_matrix.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from bench.chaos_matrix import LIMIT_S, MODULE, POLICY, checks_of  # noqa: E402
from bench.environment import environment  # noqa: E402
from slipstream.orchestrator.files.row_files import read_rows  # noqa: E402

BRIDGE, HEAD = "slipstream-br", "10.214.0.1:6379"
ANNOUNCED = Path("/tmp/ray/ray_current_cluster")
"""Ray's head leaves its address there, which any other driver of this machine would join."""
NOTICE = "http://127.0.0.1:8470/taken"
"""In each node the loopback is its own, and so is what is served there."""
ROOMS = {1: 2, 2: 1, 3: 1, 4: 1}
"""Node -> processes of a run that it has room for. A process takes a hundredth of a CPU of Ray's."""
TAKEN = """
import sys, json, ray
from ray.util.placement_group import placement_group
ray.init(sys.argv[1], log_to_driver=False)
groups = [placement_group([bundle], lifetime="detached") for bundle in json.loads(sys.argv[2])]
ray.get(groups[0].ready())
"""
"""Takes the rest, of a node that joins later as soon as it does."""
ON_NODES = [f"cluster.ray_address={HEAD}", "rollout.num_workers=1..3", f"rollout.notice={NOTICE}"]
WORDS = [
    *POLICY, "run.loggers=[]", "trainer.num_ranks=1", "trainer.ep_size=1", "trainer.optim.lr=1e-12",
    "rollout.max_model_len=512", "rollout.sampling.max_tokens=480", "rollout.eval.temperature=0",
    "run.eval_every_steps=1", "run.samples_per_step=24", "algorithm.group_size=4", "run.checkpoint_every_steps=0",
    "run.num_steps=100000",
]  # fmt: skip
NUM_STARTS, NUM_HELD_OUT = 4, 24
SHORT_S, LONG_S = 4.0, 90.0
"""Ray gives a node up that is silent for half a minute or so."""


Begin = Callable[[Sequence[str]], subprocess.Popen[bytes]]
"""Starts a process somewhere."""


def run(*command: str) -> str:
    """Run a command of iproute2, and end the bench with its words if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()} (root is needed)")
    return done.stdout


def address(number: int) -> str:
    return f"10.214.0.{number}"


class Node:
    """A namespace with an address, a Ray node and a page for its notice.

    Args:
        number: 1 is Ray's head.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = f"slipstream-{number}", address(number)
        self._folder = folder / self.name
        self._folder.mkdir()
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", f"slip{number}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", f"slip{number}", "master", BRIDGE, "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", self.name, "link", "set", interface, "up")
        run("ip", "-n", self.name, "route", "add", "default", "dev", "eth0")  # Ray looks for one
        self._begin_ray(
            ["--head", "--port=6379", "--include-dashboard=false"] if number == 1 else [f"--address={HEAD}"]
        )
        self._page = self._folder / "page"
        self._page.mkdir()
        self.begin([sys.executable, "-m", "http.server", "8470", "--bind", "127.0.0.1", "--directory", str(self._page)])

    def _begin_ray(self, where: Sequence[str]) -> None:
        """Ray gives its processes half a minute, which a busy machine may not have."""
        sizes = ["--num-cpus=1", f"--object-store-memory={100 << 20}", "--disable-usage-stats"]
        for _ in range(NUM_STARTS):
            said = self._folder / "said.txt"
            said.unlink(missing_ok=True)
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", *sizes]
            ray = self.begin([*words, f"--node-ip-address={self.address}"])
            while ray.poll() is None:
                if "Ray runtime started" in said.read_text():
                    return
                time.sleep(0.2)
        sys.exit(f"Ray does not start in {self.name}")

    def begin(self, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self._folder / "said.txt").open("a") as said:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=said, stderr=said, start_new_session=True,
                env={**os.environ, **variables},
            )  # fmt: skip

    def take(self) -> None:
        """Give notice that it will be taken."""
        (self._page / "taken").touch()

    def lose(self) -> None:
        """End it, all its processes at once."""
        for pid in run("ip", "netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "delete", self.name)


class Watched:
    """A run that goes on, and what has been seen of it."""

    def __init__(self, folder: Path, command: subprocess.Popen[bytes]) -> None:
        self.folder, self._command = folder / "latest", command
        self.phases: list[dict[str, Any]] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def log(self) -> str:
        """run.log."""
        return (self.folder / "run.log").read_text()

    def phase(self, name: str, is_over: Callable[[list[dict[str, Any]]], bool], num_steps: int = 3) -> None:
        """Wait until it is over, and for some steps more; then note how steps went meanwhile. `workers` is [how many
        served, for how many steps], one after the other.
        """
        began, first = time.time(), len(self.rows)
        self.wait(name, is_over)
        over_s, last = time.time() - began, len(self.rows)
        self.wait(name, lambda rows: len(rows) >= last + num_steps)
        spans = [row for row in read_rows(self.folder / "timeline.jsonl") if row["step"] >= first]
        ends = [began, *(row["to"] for row in spans)]
        waits = [after - before for before, after in itertools.pairwise(ends)]
        rows = self.rows[first:]
        self.phases.append(
            {
                "phase": name,
                "seconds": round(over_s, 1),
                "steps": last - first,
                "median_step_s": round(statistics.median(waits), 2),
                "longest_wait_s": round(max(waits), 2),
                "workers": [
                    [number, len(list(same))]
                    for number, same in itertools.groupby(row["rollout/replicas_serving"] for row in rows)
                ],
                "handed_over": sum(row["rollout/handed_over"] or 0 for row in rows),
                "groups_again": sum(row["rollout/groups_failed"] or 0 for row in rows),
            }
        )
        print(json.dumps(self.phases[-1]), flush=True)

    def wait(self, name: str, is_over: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Until it is over; the bench ends if the run does, or takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while not is_over(self.rows):
            if self._command.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name}: the run {'has ended' if self._command.poll() is not None else 'does not get there'}")
            time.sleep(0.2)

    def wait_for_responses(self) -> None:
        """Until a publish has ended, when all workers begin with some."""
        ended = re.compile("publish of version .* ended")
        num_ended = len(ended.findall(self.log))
        self.wait("responses begin", lambda rows: len(ended.findall(self.log)) > num_ended)

    def worker_on(self, node: Node) -> str:
        """The newest process of one that began there. Example: "rollout-2.1", after a restart."""
        return re.findall(rf"(rollout-\S+) is process \d+ at tcp://{re.escape(node.address)}:", self.log)[-1]

    def cut(self, node: Node, seconds: float) -> dict[str, Any]:
        """`slipstream chaos` cuts it off."""
        victim = self.worker_on(node).replace("rollout", "worker").partition(".")[0]
        words = [victim, "--what", "cut", "--stop-s", str(seconds), "--patience-s", "300"]
        done = subprocess.run(
            [*MODULE, "chaos", str(self.folder), *words, "--json"], capture_output=True, text=True, timeout=LIMIT_S
        )
        print(done.stderr, end="", flush=True)
        return json.loads(done.stdout)["events"][0]


def serving(count: int) -> Callable[[list[dict[str, Any]]], bool]:
    """Whether so many workers serve, and take publishes."""
    return lambda rows: rows[-1]["rollout/replicas_serving"] == count == rows[-1]["sync/replicas_committed"]


def joined(nodes: dict[int, Node], folder: Path, *numbers: int) -> bool:
    """Let these nodes join, one after the other, unless they have."""
    for number in numbers:
        nodes[number] = nodes.get(number) or Node(number, folder)
    return True


def come_and_go(watched: Watched, nodes: dict[int, Node], folder: Path) -> list[dict[str, Any]]:
    """One, three, one. What `slipstream chaos` said."""
    watched.phase("quiet", lambda rows: len(rows) >= 4)
    watched.phase("two nodes join", lambda rows: joined(nodes, folder, 2, 3) and serving(3)(rows))
    watched.phase("quiet, three workers", lambda rows: True, num_steps=4)
    events: list[dict[str, Any]] = []
    watched.phase("one is cut off shortly", lambda rows: not events.append(watched.cut(nodes[2], SHORT_S)))
    watched.phase("one is cut off for long", lambda rows: not events.append(watched.cut(nodes[3], LONG_S)))
    nodes.pop(3).lose()
    watched.phase("another joins", lambda rows: joined(nodes, folder, 4) and serving(3)(rows))
    watched.wait_for_responses()  # a notice is seen within 2 s
    nodes[4].take()
    name = re.escape(watched.worker_on(nodes[4]))
    watched.phase("it gets a notice", lambda rows: bool(re.search(rf"{name} has gone", watched.log)))
    (num_requests,) = re.findall(rf"{name} handed (\d+) groups over", watched.log)
    watched.phases[-1]["requests_it_had"] = int(num_requests)
    nodes.pop(2).lose()
    watched.phase("one is lost", serving(1))
    return events


def by_command(watched: Watched) -> None:
    """One, three, one, asked for by `slipstream scale`."""
    watched.phase("quiet", lambda rows: len(rows) >= 4)
    for number in (3, 1):
        watched.wait_for_responses()
        subprocess.run([*MODULE, "scale", str(watched.folder), f"rollout={number}"], check=True, timeout=LIMIT_S)
        watched.phase(f"slipstream scale rollout={number}", serving(number))
        watched.phase("quiet", lambda rows: True, num_steps=4)


def greedy(folder: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Responses of evaluations: prompts and tokens."""
    rows = read_rows(folder / "samples.jsonl")
    return [(row["prompt_id"], tuple(row["token_ids"])) for row in rows if row["kind"] != "training"]


def begin_here(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def train(folder: Path, words: Sequence[str], begin: Begin) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    held_out = folder / "held_out.jsonl"
    rows = (ROOT / "conf" / "data" / "letters_heldout.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(rows[:NUM_HELD_OUT]))
    command = begin([*MODULE, "train", *WORDS, f"data.eval_path={held_out}", f"run.dir={folder}", *words])
    deadline = time.monotonic() + LIMIT_S
    while not read_rows(folder / "latest" / "metrics.jsonl"):
        if command.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run in {folder} does not start")
        time.sleep(0.5)
    return command


def on_nodes(folder: Path, out: Path) -> None:
    """A run on nodes that come and go, and what it does."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    nodes: dict[int, Node] = {}
    try:
        nodes[1] = Node(1, folder)
        taken = [{"CPU": 1 - room / 100, f"node:{address(number)}": 0.01} for number, room in ROOMS.items()]
        nodes[1].begin([sys.executable, "-c", TAKEN, HEAD, json.dumps(taken)]).wait(LIMIT_S)
        measure(folder, out, ON_NODES, nodes[1].begin, lambda watched: come_and_go(watched, nodes, folder))
    finally:
        for node in nodes.values():
            node.lose()
        run("ip", "link", "delete", BRIDGE)
        ANNOUNCED.unlink(missing_ok=True)


def measure(folder: Path, out: Path, words: Sequence[str], begin: Begin, harm: Callable[[Watched], Any]) -> None:
    """A run, what it does while workers come and go, and an undisturbed one."""
    command = train(folder, words, begin)
    watched = Watched(folder, command)
    events = harm(watched)
    subprocess.run([*MODULE, "stop", str(watched.folder)], capture_output=True, timeout=LIMIT_S)
    command.wait(LIMIT_S)
    train(folder / "twin", [*words, "run.num_steps=2"], begin).wait(LIMIT_S)
    seen, undisturbed = greedy(watched.folder), greedy(folder / "twin" / "latest")
    assert len({prompt for prompt, _ in undisturbed}) == len(set(undisturbed)) == NUM_HELD_OUT
    found = {
        **environment(),
        "phases": watched.phases,
        "events": events,
        "workers": re.findall(r"rollout-\S+ (?:serves|handed|has gone).*", watched.log),
        "checks": checks_of(watched.folder, is_policy=True),
        "greedy_responses": len(seen),
        "of_them_other_than_undisturbed": sum(response not in undisturbed for response in seen),
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in list(found)[-4:]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-command", action="store_true", help="`slipstream scale` on this machine, without nodes")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/slipstream-nodes"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir()
    results = ROOT / "bench" / "results"
    if arguments.by_command:
        out = arguments.json or results / "scale-cpu.json"
        measure(arguments.folder, out, ["rollout.num_workers=1"], begin_here, by_command)
    else:
        on_nodes(arguments.folder, arguments.json or results / "nodes-cpu.json")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    main()
