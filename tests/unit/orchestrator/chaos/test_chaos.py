"""Locks: only processes of the run are found and hit, at the moment that was asked for; a row says what it cost."""

import itertools
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.chaos.command import ChaosOptions, chaos, draw, report
from slipstream.orchestrator.chaos.harm import Blow, Harm
from slipstream.orchestrator.chaos.victims import Kind, Moment, RunWatch, Victim, victims_of
from slipstream.orchestrator.chaos.ways import What
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.control.control_folder import alive
from slipstream.orchestrator.files.run_folder import RunFolder

Start = Callable[[Path, str], psutil.Process]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run with checkpoints."""
    folder = RunFolder(tmp_path / "run")
    folder.crashes.mkdir(parents=True)
    folder.config.write_text("run: {num_steps: 9, checkpoint_every_steps: 3}\nalgorithm: {objective: policy}")
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that holds the report of this name open, as those of a run do."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(run: Path, report: str) -> psutil.Process:
        with (run / "crash" / f"{report}.txt").open("a") as file:
            started.append(subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()]))
        return psutil.Process(started[-1].pid)

    yield begin
    for process in started:
        process.kill()
        process.wait()


def log(folder: RunFolder, at: float, line: str) -> None:
    """A line of run.log."""
    stamp = datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S,%f")[:23]
    with folder.log.open("a") as file:
        file.write(f"{stamp} I [step 1 v1] slipstream.{line}\n")


def step(folder: RunFolder, number: int, **figures: int) -> None:
    """The rows of a step that has taken no time, behind what a power cut, or a hand, has left in the timeline."""
    now = time.time()
    row = {"step": number, "rollout/replicas_serving": 2, "rollout/replicas_wanted": 2, **figures}
    damaged = '\0\0\0\n{"step": 9}\n{"step": 9, "from": 1.0, "to": null}\n'
    whole = json.dumps({"step": number, "from": now, "to": now})
    for path, content in ((folder.metrics, json.dumps(row)), (folder.timeline, damaged + whole)):
        with path.open("a") as file:
            file.write(content + "\n")
    log(folder, now, f"orchestrator.files.run_log: step {number}/9  reward 0.5")


def harm_of(folder: RunFolder, **options: float) -> Harm:
    return Harm(
        folder, seed=3, stop_s=options.get("stop_s", 0.1), rest_bytes=0, patience_s=options.get("patience_s", 240),
        resumes=False, say=lambda line: None,
    )  # fmt: skip


def test_processes_are_known_by_the_reports_of_the_run_that_they_hold_open(folder: RunFolder, start: Start) -> None:
    reports = ("trainer-0", "trainer-1.2", "rollout-1", "rollout-1-EngineCore", "keeper-of-5474c592", "rollout-1-actor")
    started = {report: start(folder.root, report) for report in reports}
    other = RunFolder(folder.root.with_name("other"))
    other.crashes.mkdir(parents=True)
    stranger = start(other.root, "trainer-0")
    with (folder.crashes / "trainer-0.txt").open():  # as `tail -f` has it, in an older process
        found = {victim.name: (victim.kind, victim.pids) for victim in victims_of(folder)}
    assert found == {
        "engine-1": (Kind.engine, [started["rollout-1-EngineCore"].pid]),
        "worker-1": (Kind.worker, [started["rollout-1"].pid]),
        "trainer-0": (Kind.trainer, [started["trainer-0"].pid]),
        "trainer-1": (Kind.trainer, [started["trainer-1.2"].pid]),
        "keeper-5474c592": (Kind.keeper, [started["keeper-of-5474c592"].pid]),
    }
    assert [victim.pids for victim in victims_of(other)] == [[stranger.pid]]


def test_moments_are_those_that_the_log_tells(folder: RunFolder) -> None:
    publish = "orchestrator.loop.publication: publish of version 1"
    log(folder, 100.0, "orchestrator.files.run_log: step 0/9  reward 0.5")
    watch = RunWatch(folder)
    assert (watch.step, watch.is_on(Moment.sampling, 100.1)) == (0, False), "nothing is trained on before step 1"
    log(folder, 100.2, "orchestrator.files.run_log: step 1/9  reward 0.5")
    log(folder, 101.0, f"{publish} begins")
    folder.metrics.write_text(
        json.dumps({"step": 1, "sync/total_s": 1.0, "sync/verify_s": 0.25, "sync/commit_s": 0.25}) + "\n"
    )
    watch.look()
    assert watch.is_on(Moment.publish, 101.1) and not watch.is_on(Moment.sampling, 101.1)
    assert [watch.is_on(Moment.verify, at) for at in (101.4, 101.6, 101.8)] == [False, True, False]
    log(folder, 101.9, f"{publish} ended after 0.9 s: 2 of 2 replicas committed")
    log(folder, 102.0, "orchestrator.files.run_log: step 2/9  reward 0.5")
    log(folder, 102.1, "fleet.supervisor: rollout-1.1 is out of service and is restarted, 1 other worker left: it died")
    watch.look()
    assert watch.had_ended(102.0) and not watch.is_on(Moment.publish, 102.0) and watch.is_on(Moment.sampling, 102.0)
    assert watch.is_on(Moment.recovery, 102.2)
    log(folder, 103.0, "fleet.roster: rollout-1.2 serves again, 0.9 s after it failed")
    watch.look()
    assert not watch.is_on(Moment.recovery, 103.0) and not watch.is_on(Moment.checkpoint, 103.0)
    log(folder, 104.0, "fleet.supervisor: rollout-0 is out of service and is restarted, 1 other worker left: it died")
    log(folder, 110.0, "orchestrator.cluster.rollout_workers: up: 2 rollout workers; an engine takes up to 4 requests")
    assert not RunWatch(folder).recovering, "the run was stopped meanwhile, and resumed with new workers"
    (folder.checkpoints / ".step-000002.partial").mkdir(parents=True)
    assert watch.is_on(Moment.checkpoint, 103.0)


def test_the_same_seed_draws_the_same_and_kinds_alike() -> None:
    there = [Victim(Kind.engine, "engine-0", ()), *(Victim(Kind.trainer, f"trainer-{rank}", ()) for rank in range(7))]

    def drawn(seed: int) -> list[Blow]:
        rng = random.Random(seed)
        chosen, what, when = ["engine", "trainer"], list(What), [Moment.now, Moment.recovery]
        return [draw(rng, there, chosen, what, when, 0.1) for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    num_engines = sum(blow.kind is Kind.engine for blow in drawn(1))
    assert 70 < num_engines < 130, "a coin's toss, not one of eight processes"
    assert not any(blow.what is What.fill for blow in drawn(1)), "a process is not filled"
    filled = draw(random.Random(1), there, ["disk"], list(What), [Moment.now], 0.1)
    assert (filled.kind, filled.what) == (Kind.disk, What.fill)
    assert {blow.first for blow in drawn(1) if blow.moment is Moment.recovery} == {"engine-0"}


def test_a_row_says_what_a_death_cost(folder: RunFolder, start: Start) -> None:
    """A rank is killed after step 4. Step 5 is finished still; then both are made again, one with two groups, and a new
    rank is there when step 6 begins.
    """
    victim = start(folder.root, "trainer-0")
    step(folder, 4, **{"rollout/groups_failed": 50})

    def go_on() -> None:
        victim.wait()
        time.sleep(0.05)
        step(folder, 5)
        log(folder, time.time(), "orchestrator.cluster.rebirth: both trainer ranks are started again (1 of 3)")
        step(folder, 4, **{"rollout/groups_failed": 2, "reward/failures": 1})
        start(folder.root, "trainer-0.1")
        log(folder, time.time(), "orchestrator.cluster.rebirth: trainer ranks are up again after 6 s; made again: x")
        for number in itertools.count(5):
            step(folder, number)
            time.sleep(0.1)
            if (folder.root / "done").exists():
                break

    with alive(folder.root):
        thread = threading.Thread(target=go_on)
        thread.start()
        event = harm_of(folder).do(Blow(Kind.trainer, "trainer-0", What.kill, Moment.now), 0)
        (folder.root / "done").touch()
        thread.join()
    assert not victim.is_running()
    assert (event.outcome, event.met, event.step, event.pids) == ("as before", True, 4, [victim.pid])
    assert (event.steps_again, event.groups_again, event.rewards_failed) == (2, 2, 1)
    assert event.longest_s is not None and event.all_after_s is not None
    assert 0 < event.longest_s <= event.all_after_s
    (row,) = map(json.loads, folder.chaos.read_text().splitlines())
    assert (row["seed"], row["victim"], row["what"], row["asked"]) == (3, "trainer-0", "kill", "now")
    assert "trainer-0  now  yes  as before" in report(folder.root, [event], as_json=False)


def test_what_is_stopped_goes_on_and_a_run_that_ends_is_an_outcome(folder: RunFolder, start: Start) -> None:
    victim = start(folder.root, "rollout-0-EngineCore")
    with alive(folder.root):
        ends = threading.Timer(
            0.2, lambda: (folder.root / "control" / "end.json").write_text('{"state": "failed", "error": "lost"}')
        )
        ends.start()
        stopped = harm_of(folder, patience_s=1.5).do(Blow(Kind.engine, "engine-0", What.stop, Moment.now), 0)
        ends.join()
        while victim.status() != psutil.STATUS_SLEEPING:  # it may wait for a core
            time.sleep(0.01)
        assert stopped.outcome == "not as before", "no step came"
        harm = harm_of(folder)
    lost = harm.do(Blow(Kind.engine, "engine-0", What.kill, Moment.now), 1)
    assert (lost.outcome, lost.pids) == ("not met", []), "nobody is looked for in a run that has ended"
    assert victim.is_running()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["raylet"], "has no raylet on this machine; the Ray cluster that it uses is not its own; it has trainer"),
        (["agent,trainer"], "has no agent on this machine; it has trainer"),
        (["trainer-7"], "has no trainer-7 on this machine"),
        (["somebody"], "VICTIM must be of engine, worker, trainer, "),
        (["--what", "maim"], "--what must be of kill, stop, term, slow, cut, fill, got 'maim'"),
        (["trainer,disk"], "disk can be harmed only with --what fill; got --what kill"),
        (
            ["trainer", "--what", "fill"],
            "trainer can be harmed only in another way; --what fill is for shm, disk, store",
        ),
        (["disk", "--what", "fill,slow"], "--what slow fits no VICTIM of disk; fill takes shm, disk, store"),
        (["trainer", "--what", "kill,cut"], "uses the same network as this command, and so do others"),
        (["store", "--what", "fill"], "no store that is a folder here (run.checkpoint_dir=None)"),
        (["disk", "--what", "fill", "--rest-bytes", "-1"], "--rest-bytes must be >= 0, got -1"),
        (["--when", "later,now"], "--when must be of now, start, "),
        (["--every", "60"], "--every and --for go together"),
        (["--stop-s", "0"], "--stop-s must be > 0 and finite, got 0"),
        (["--for", "-1", "--every", "1"], "--for must be > 0 and finite, got -1"),
        (["--seed", "x"], "--seed must be an integer, got 'x'"),
    ],
)
def test_bad_input_gets_one_message(
    folder: RunFolder, start: Start, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    rank = start(folder.root, "trainer-0")
    with alive(folder.root):
        assert main(["chaos", str(folder.root), *words]) == 2
    assert said in capsys.readouterr().err
    assert rank.is_running() and not folder.chaos.exists()


@pytest.mark.parametrize(
    ("options", "when", "said"),
    [
        ("algorithm: {objective: sft}", "publish", "algorithm=sft, it has no rollout workers"),
        ("run: {checkpoint_every_steps: 0}", "checkpoint", "writes none before its end"),
        ("run: {}", "start", "the run has started"),
    ],
)
def test_a_moment_that_never_comes_is_refused(
    folder: RunFolder, start: Start, options: str, when: str, said: str
) -> None:
    start(folder.root, "trainer-0")
    folder.config.write_text(options)
    log(folder, time.time(), "orchestrator.files.run_log: step 0/9  reward 0.5")
    with alive(folder.root), pytest.raises(ConfigError, match=said):
        chaos(ChaosOptions(run=folder.root, when=(when,)), print)


def test_a_run_that_has_ended_or_is_another_users_is_refused(
    folder: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder.root, "trainer-0")
    with pytest.raises(ConfigError, match="has ended: there is nothing to harm; there is no checkpoint"):
        chaos(ChaosOptions(run=folder.root), print)
    with alive(folder.root), monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 4711)
        with pytest.raises(ConfigError, match="belongs to another user"):
            chaos(ChaosOptions(run=folder.root), print)
        assert victims_of(folder) == []


def test_the_list_names_whom_there_is(folder: RunFolder, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [start(folder.root, f"trainer-{rank}").pid for rank in range(2)]
    start(folder.root, "command")
    with alive(folder.root):
        assert main(["chaos", str(folder.root), "--list", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["chaos", str(folder.root), "--list"]) == 0
    assert [(one["name"], one["outlived"]) for one in found] == [
        ("trainer-0", True), ("trainer-1", True), ("controller", False), ("shm", False), ("disk", False),
    ]  # fmt: skip
    assert [one["pids"] for one in found[:2]] == [[pid] for pid in ranks]
    assert "only if named" in capsys.readouterr().out
    assert not folder.chaos.exists()
