"""Locks: a run's folder says where it stands, whether it goes on or not, and a folder that is none is named."""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from slipstream.conf.load import load_run_config
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.status import NUM_RECENT, status_of
from slipstream.orchestrator.control.control_folder import alive, note_dashboard, note_start, note_started
from slipstream.orchestrator.files.run_folder import RunFolder, to_plain
from slipstream.orchestrator.metrics.catalogue import METRICS
from slipstream.orchestrator.view.run_reader import RunReader


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of a run of 110 steps."""
    config = to_plain(asdict(load_run_config(["experiment=quickstart"])))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def write(file: Path, *rows: Mapping[str, object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(run: Path, num_steps: int) -> None:
    steps = range(num_steps + 1)
    rows = [dict.fromkeys(METRICS) | {"step": step, "step/total_s": 60.0 if step == 1 else 2.0} for step in steps]
    for row, step in zip(rows[1:], steps[1:], strict=True):
        row |= {"reward/mean": step / 100, "rollout/replicas_serving": 2, "reward/failures": 1}
    write(run / "metrics.jsonl", *rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99')  # being written
    write(run / "evaluations.jsonl", *({"step": step, "eval/reward": step / 200} for step in steps[::20]))


def save(run: Path, step: int, *, is_whole: bool = True) -> None:
    (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    if is_whole:
        (run / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")


def test_before_the_first_row(run: Path) -> None:
    status = status_of(run)
    assert (status.state, status.step, status.num_steps, status.recent) == ("stopped", None, 110, {})
    assert status.checkpoint is None and "none of 110 yet" in status.as_text()


def test_parts_of_a_run_ran_with_what_is_named(run: Path) -> None:
    assert "\nresumed" not in status_of(run).as_text()
    for number in (10, 2, 1):
        (run / f"config.{number}.yaml").touch()
    kept = "config.1.yaml, config.2.yaml, config.10.yaml and environment.*.json"
    assert f"\nresumed     3 times; it ran before with {kept}\n" in status_of(run).as_text()


@pytest.mark.parametrize("damaged", ["{}", '{"step": "x"}', '{"step": 3, "step/total_s": "x", "reward/mean": "x"}'])
def test_a_damaged_row_costs_itself(run: Path, damaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(run, 2)
    (run / "startup.jsonl").touch()
    for name in ("metrics", "evaluations", "startup"):
        path = run / f"{name}.jsonl"
        path.write_text(path.read_text().removesuffix('{"step": 99') + damaged + "\n")
    with alive(run):
        assert main(["status", str(run), "--json", "--curves"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["left_s"], status["recent"]["reward/mean"]) == (2.0 * (110 - status["step"]), pytest.approx(0.015))
    metrics = RunReader(run).metrics(["reward/mean"], 0)
    assert metrics["columns"] == {"reward/mean": [None, 0.01, 0.02, *[None] * (status["step"] - 2)]}


def test_a_clock_that_was_set_back_makes_no_step_of_the_future(run: Path) -> None:
    write_rows(run, 3)
    os.utime(run / "metrics.jsonl", times=(2**32, 2**32))
    assert status_of(run).since_s == 0


def test_what_a_start_waits_for_is_shown_until_it_is_over(run: Path) -> None:
    folder = RunFolder(run)
    with alive(run):
        assert status_of(run).starting is None
        note_start(folder, 34.0, "engines 1 of 2 up (rollout-0: importing vLLM)")
        shown = status_of(run).as_text().splitlines()
        assert re.fullmatch(r"starting +\d+ s: engines 1 of 2 up \(rollout-0: importing vLLM\)", shown[2])
        note_started(folder)
        note_started(folder)
        assert "starting" not in status_of(run).as_text()
        note_start(folder, 1.0, "Ray")
    assert status_of(run).starting is None, "the start has failed"
    with alive(run):
        assert status_of(run).starting is None, "of an earlier start"


def test_what_the_last_start_took_is_shown(run: Path) -> None:
    def row(start: str, what: str) -> dict[str, object]:
        span = {"who": start, "what": what, "from_s": 0.0, "to_s": 30.0}
        return {"start": start, "total_s": 30.0, "spans": [span]}

    write(run / "startup.jsonl", row("run", "before the resume"), row("run", "Ray"), row("rollout-1.1", "vLLM"))
    text = status_of(run).as_text()
    assert "start-up, 30.0 s: Ray 30.0" in text and "before the resume" not in text


def test_a_run_that_goes_on(run: Path) -> None:
    write_rows(run, 50)
    save(run, 50)
    save(run, 60, is_whole=False)
    (run / "run.log").write_text(
        "2026-01-31 12:00:00,000 I [step 1 v1] slipstream.orchestrator.run: fine\n"
        "2026-01-31 12:00:01,000 W [step 2 v2] orchestrator.supervisor: rollout-0 is out of service\n"
        "2026-01-31 12:00:02,000 W [step 2 v2] rollout.rewards.runner: reward r failed (raised) on prompt 7:\n"
        "Traceback (most recent call last):\n  File 'r.py', line 7\nKeyError: 'solution'\n"
        "2026-01-31 12:00:03,000 I [step 2 v2] orchestrator.run: fine\n  as well\n"
    )
    with alive(run):
        note_dashboard(RunFolder(run), "http://127.0.0.1:8266, asks for the token in /tmp/slipstream-a/token")
        status = status_of(run)
    assert re.search(r"Ray dashboard +http://127.0.0.1:8266, asks for", status.as_text())
    assert status_of(run).dashboard is None, "it ended with the run"
    assert (status.state, status.step, status.checkpoint, status.replicas_serving) == ("running", 50, 50, 2)
    assert status.left_s == 120.0, "60 steps of 2 s: the first one, which compiles, does not count"
    assert status.recent["reward/mean"] == pytest.approx(sum(range(31, 51)) / 100 / NUM_RECENT)
    assert status.held_out == {"eval/reward at step 0": 0.0, "eval/reward at step 40": 0.2}
    assert status.counts["reward/failures"] == 50
    text = status.as_text()
    assert "50 of 110" in text and "left 2:00" in text and "rewards that failed" in text
    assert text.splitlines()[-2].endswith("rollout-0 is out of service")
    assert text.splitlines()[-1].endswith("reward r failed (raised) on prompt 7: KeyError: 'solution'")
    assert "fine" not in text and "steps refused" not in text


def test_what_deaths_would_cost(run: Path) -> None:
    write_rows(run, 50)
    with alive(run):
        assert "machine lost" in status_of(run).as_text() and status_of(run).loss_steps == 50
        assert re.search(r"trainer rank lost +ends the run", status_of(run).as_text())
    write(run / "metrics.jsonl", {"step": 51, "step/total_s": 2.0, "trainer/unkept_steps": 1})
    save(run, 50)
    with alive(run):
        text = status_of(run).as_text()
    assert re.search(r"machine lost +costs 1 finished step\n", text)
    assert re.search(r"trainer rank lost +costs at most 1 finished step", text)
    sent = {"url": "s3://bucket/run", "step": 40, "problem": "no network"}
    write(run / "checkpoints" / "remote.json", sent)
    status = status_of(run)
    assert (status.checkpoint, status.loss_steps, status.remote) == (50, 11, sent)
    assert re.search(r"step 50; step 40 in s3://bucket/run \(the last try: no network\)", status.as_text())
    assert "trainer rank lost" not in status.as_text(), "the run has ended"


def test_the_best_checkpoint_is_shown_with_its_figure(run: Path) -> None:
    folder = run / "checkpoints"
    save(run, 50)
    best = {"metric": "eval/reward", "value": 0.62, "step": 40, "since": 0, "held_out": {}}
    write(folder / "best.json", best)
    assert "best checkpoint" not in status_of(run).as_text(), "removed when the run went on without run.keep_best"
    save(run, 40)
    status = status_of(run)
    assert status.best == {"metric": "eval/reward", "value": 0.62, "step": 40}
    assert re.search(r"best checkpoint +step 40, with eval/reward 0.62\n", status.as_text() + "\n")
    write(folder / "best.json", best | {"value": None})
    assert "step 40, with another figure than the run's now" in status_of(run).as_text()


def test_goodput_is_of_the_whole_run_with_its_starts(run: Path) -> None:
    row = {"step/total_s": 2.0, "step/gpus": 4.0, "step/between_s": 0.0, "trainer/num_tokens": 100}
    write(run / "metrics.jsonl", *(dict.fromkeys(METRICS) | row | {"step": step} for step in range(1, 11)))
    write(run / "startup.jsonl", {"start": "run", "total_s": 5.0, "spans": []})
    status = status_of(run)
    assert status.goodput["share"] == pytest.approx(0.8)
    assert re.search(r"goodput +80.0% of 0.03 process-hours\n  start +20.0%", status.as_text())
    on_gpus = replace(status, device="cuda").as_text()
    assert re.search(r"goodput +80.0% of 0.03 GPU-hours$", on_gpus, re.MULTILINE)


def test_a_run_that_is_over(run: Path) -> None:
    write_rows(run, 110)
    assert status_of(run).state == "stopped", "nothing was exported"
    (run / "adapter").mkdir()
    assert (status_of(run).state, status_of(run).left_s) == ("finished", None)


def test_a_run_that_failed_says_why(run: Path) -> None:
    with contextlib.suppress(NoReplicasLeft), alive(run):
        raise NoReplicasLeft("every worker is gone")
    text = status_of(run).as_text()
    assert re.search(r"^state +failed\nerror +NoReplicasLeft: every worker is gone$", text, re.MULTILINE)


def test_reward_parts_length_and_truncation_are_shown(run: Path) -> None:
    row = {"step": 1, "reward/mean": 0.75, "reward/right_mean": 0.5, "reward/short_mean": 0.25, "step/total_s": 1.0}
    row |= {"rollout/response_tokens_mean": 40.5, "rollout/truncated_fraction": 0.5, "reward/no_spread_fraction": 1.0}
    row |= {"rollout/replicas_serving": 1, "distill/kl_mean": 1.25}
    write(run / "metrics.jsonl", row | {"step": 0}, row)
    shown = [re.split(r"  +", line.strip()) for line in status_of(run).as_text().splitlines()]
    at = shown.index(["reward", "0.750"])
    assert shown[at + 1 : at + 3] == [["right", "0.500"], ["short", "0.250"]]
    assert shown[at + 3 : at + 7] == [
        ["groups of equal rewards", "100%"],
        ["KL to the teacher, nats", "1.250"],
        ["tokens of a response", "40"],
        ["responses cut off", "50%"],
    ]


def test_rewards_that_failed_are_told_with_of_how_many(run: Path) -> None:
    failures = (
        {"eval/failures": 1, "eval/rollouts": 20},
        *({"reward/failures": n, "reward/rollouts": 64} for n in (3, 0)),
    )
    write(run / "metrics.jsonl", *(row | {"step": step, "step/total_s": 1.0} for step, row in enumerate(failures)))
    text = status_of(run).as_text()
    assert re.search(r"^rewards that failed +3 of 128$", text, re.MULTILINE)
    assert re.search(r"^held-out rewards that failed +1 of 20$", text, re.MULTILINE)


def test_each_held_out_set_of_the_newest_evaluation_is_shown(run: Path) -> None:
    rows = [{"step": step, "eval/reward": 0.5, "eval/aime/reward": 0.25} for step in (0, 9)]
    rows[1]["eval/aime/pass_at_1"] = 1.0
    write(run / "evaluations.jsonl", *rows)
    shown = [line for line in status_of(run).as_text().splitlines() if line.startswith("held-out")]
    assert [re.split(r"  +", line) for line in shown] == [
        ["held-out reward at step 0", "0.5"],
        ["held-out reward at step 9", "0.5"],
        ["held-out aime/reward at step 9", "0.25"],
    ]


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(run, 3)
    assert main(["status", str(run), "--json", "--curves"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    (run / "curves.png").unlink()
    (run / "curves.png").mkdir()  # as a folder of another user
    assert main(["status", str(run), "--curves"]) == 2
    assert "curves.png cannot be written: Is a directory" in capsys.readouterr().err
    assert main(["status", str(run / "nowhere")]) == 2
    assert "is not a run folder; give one like runs/latest" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "view", "stop", "resume", "merge"])
def test_where_there_are_no_runs_commands_say_how_one_is_started(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *([] if command in ("status", "view") else ["runs/latest"])]) == 2
    said = capsys.readouterr().err
    assert "latest is not a run folder; no run is in " in said and "runs yet: start one with slipstream train" in said
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "environment.json").touch()
    (tmp_path / "runs" / "latest").symlink_to("gone")
    for words in ([] if command in ("status", "view") else ["runs/latest"]), ["runs"]:
        assert main([command, *words]) == 2
        assert re.search(r"is not a run folder; give one of 1 in .*runs, .* first: mine\n", capsys.readouterr().err)
    assert main(["status", "runs/one/checkpoints/step-000003"]) == 2
    assert "step-000003 is not a run folder; give the run's, runs/one\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (b"run: {num_steps: 3", "config.yaml cannot be read (ParserError)"),
        (b"run", "config.yaml holds no options of a run"),
        (b"run: {}", "config.yaml holds no run.num_steps"),
    ],
)
def test_a_damaged_description_is_one_message(
    saved: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(saved)
    assert main(["status", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["merge", "eval", "parity", "resume", "status", "view"])
def test_a_description_that_is_no_text_is_one_message(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(b"run: {name: \xe9}")
    assert main([command, str(tmp_path)]) == 2
    assert f"error: {tmp_path / 'config.yaml'} cannot be read: it is not UTF-8 text; " in capsys.readouterr().err
