"""The command line: help that is complete and quick, flags that start nothing, exit codes, signals."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config
from slipstream.conf.options import GROUPS, flat_options, group_choices, section_docs
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.cli import flags as cli_flags
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.control.control_folder import alive
from slipstream.orchestrator.data import training_stream
from slipstream.orchestrator.errors import CheckpointError, TrainingStopped
from slipstream.orchestrator.files.run_folder import RunFolder, open_run_folder, point_latest, write_description
from slipstream.orchestrator.push.push_options import PushOptions
from slipstream.weight_sync.errors import WatermarkError

REPOSITORY = Path(__file__).parents[4]
READY = ["train", "experiment=quickstart", "cluster.dashboard=false"]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder, and leaves the process's environment as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return tmp_path


def fake_run(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Stand in for orchestrator.run, which the command line imports when it starts a run."""
    module = ModuleType("slipstream.orchestrator.run")
    module.run = run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "slipstream.orchestrator.run", module)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_top_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "slipstream train experiment=quickstart" in out
    assert "slipstream doctor" in out


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_before_a_command_is_the_commands_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "merge"]) == 0
    assert capsys.readouterr().out.startswith("usage: slipstream merge")
    assert main([word, "train", "trainer.ep_size"]) == 0
    assert capsys.readouterr().out.startswith("trainer.ep_size=")
    assert main([word, "mrge"]) == 2
    assert "Did you mean merge?" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slipstream")


def test_train_help_names_every_group_choice_and_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    words = capsys.readouterr().out.split()
    for group in GROUPS:
        assert group in words
        assert all(choice.name in words for choice in group_choices(group))
    assert all(section in words for section in section_docs())


@pytest.mark.parametrize("topic", ["trainer", "trainer.lora", "trainer.ep_size", "experiment", "options"])
def test_help_on_a_topic(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", topic]) == 0
    out = capsys.readouterr().out
    for option in flat_options():
        if topic == "options" or option.name == topic or option.name.startswith(f"{topic}."):
            assert f"{option.name}=" in out
    assert ("quickstart_gpu" in out) == (topic == "experiment")


def test_help_beside_overrides_is_general_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "experiment=quickstart"]) == 0
    assert capsys.readouterr().out.startswith("usage: slipstream train")


def test_help_on_an_unknown_topic_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "trainr"]) == 2
    assert capsys.readouterr().err.startswith("error: no help on 'trainr'. Did you mean trainer")


def test_help_lists_a_preset_without_a_comment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n")
    assert main(["train", "--config-dir", str(tmp_path), "--help", "experiment"]) == 0
    assert "\n  mine\n" in capsys.readouterr().out


def test_examples_of_help_compose(capsys: pytest.CaptureFixture[str]) -> None:
    """Every `slipstream train` and `slipstream plan` that it shows names options and choices that exist. (Those of
    pages: tests/unit/pages.)
    """
    for words in (["--help"], ["train", "--help"], ["plan", "--help"]):
        assert main(words) == 0
    shown = capsys.readouterr().out
    shown = re.sub(r"\s*\\\n\s*", " ", shown)  # an example may go on in the next line
    examples = re.findall(r"^ +slipstream (?:train|plan) ([^#\n]*=[^#\n]*)", shown, re.MULTILINE)
    known = [words.split("  ")[0].split() for words in examples if "..." not in words and "mine" not in words]
    assert len(known) >= 9
    for words in known:
        load_run_config([word for word in words if re.match(r"[a-z_.]+=", word)])


def test_defaults_of_push_are_declared_once_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    options = PushOptions(checkpoint=Path("m"), start=1)
    flags = vars(cli_flags.push().parse_args(["m", "--start", "1"]))
    given = {name: value for name, value in asdict(options).items() if name not in ("to", "serve_words")}
    assert {name: flags[name] for name in given} == given
    assert main(["push", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("tp_size", "num_threads", "watermark_mib", "timeout_s", "start_timeout_s", "log_dir"):
        assert re.search(rf"default {given[name]:g}\n" if name != "log_dir" else "default push-logs\n", shown), name


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "resume",
        "eval",
        "merge",
        "stop",
        "launch",
        "plan",
        "parity",
        "push",
        "record",
        "doctor",
        "status",
        "recover",
    ],
)
def test_every_flag_of_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: slipstream {command}")
    for flag in re.findall(r"^  (--\S+)", shown, re.MULTILINE):
        assert re.search(rf"^  {flag}[^\n]*(  \w|\n {{10,}}\w)", shown, re.MULTILINE), flag


def test_cfg_job_prints_yaml_that_loads_to_the_same_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["experiment=quickstart", "run.seed=3"]
    assert main(["train", *words, "--cfg", "job"]) == 0
    assert load_resolved_yaml(capsys.readouterr().out) == load_run_config(words)
    assert not list(tmp_path.iterdir())


def test_dry_run_reports_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("a dry run must not train"))
    assert main([*READY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "8 experts" in out
    assert "Nothing was started" in out
    assert not list(tmp_path.iterdir())


def test_a_long_read_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" for _ in range(2500))
    (tmp_path / "train.jsonl").write_text(rows)
    words = [*READY, "data.path=train.jsonl", "--dry-run"]
    monkeypatch.setattr(training_stream, "SAY_EVERY_S", 0.0)
    assert main(words) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "train.jsonl" in line]
    assert said == [f"checking train.jsonl: {count} rows so far" for count in ("1,024", "2,048")]


def test_a_run_says_at_its_start_what_is_seldom_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, lambda *_: None)
    assert main([*READY, "reward=exact_match", "rollout.sampling.max_tokens=3"]) == 0
    assert "warning: prompts: 704 in pkg://letters_train.jsonl" in capsys.readouterr().err
    assert main([*READY]) == 0
    assert "warning" not in capsys.readouterr().err


def test_train_sets_the_environment_and_hands_over_config_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, list[str], str | None]] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, words, os.environ.get("HF_HUB_OFFLINE"))))
    assert main([*READY, "run.seed=5"]) == 0
    ((config, words, offline),) = calls
    assert config.run.seed == 5
    assert words == [*READY[1:], "run.seed=5"]
    assert offline == "1"


@pytest.mark.parametrize(
    ("error", "code", "has_log", "has_traceback"),
    [
        (ConfigError("an option is wrong"), 2, False, False),
        (CheckpointError("it belongs to another run"), 2, False, False),
        (WatermarkError("trainer rank 0: raise the watermark"), 2, False, False),
        (NoReplicasLeft("every worker is gone"), 1, True, False),
        (ZeroDivisionError("a bug"), 1, True, True),
    ],
)
def test_exit_code_and_traceback_tell_whose_mistake_it_was(
    error: Exception,
    code: int,
    has_log: bool,
    has_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        raise error

    fake_run(monkeypatch, run)
    assert main(READY) == code
    err = capsys.readouterr().err
    assert ("Traceback" in err) == has_traceback
    assert str(error) in err.splitlines()[-3 if has_log else -1]
    assert (f"Log: {opened[0].log}\nThere is no checkpoint yet" in err) == has_log


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NoReplicasLeft("every worker is gone")])
def test_a_run_that_ended_early_says_how_to_go_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        for name in ("step-000020", "step-000040", ".step-000060.partial"):
            (folder.checkpoints / name).mkdir(parents=True)
            (folder.checkpoints / name / "manifest.json").write_text("{}")
        beside = open_run_folder(config.run, datetime.now())  # another run in the same run.dir: `latest` names it
        point_latest(beside.root)
        (beside.checkpoints / "step-000012").mkdir(parents=True)
        (beside.checkpoints / "step-000012" / "manifest.json").write_text("{}")
        raise error

    fake_run(monkeypatch, run)
    assert main([*READY, "model.hf_config.note={a: 1}"]) != 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Go on")]
    told, _, command = said.partition(": ")
    assert told == "Go on from step 40"
    assert shlex.split(command) == ["slipstream", "resume", str(opened[0].root)]


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder with options of its own and one checkpoint, of step 3."""
    config = load_run_config([*READY[1:], "run.seed=7", "model.hf_config.rope_theta=5.0"])
    folder = RunFolder(tmp_path / "old run")
    folder.root.mkdir()
    write_description(folder, config, [])
    store = CheckpointStore(folder.checkpoints, keep=2, options=fingerprint(config))
    store.finish(store.begin(3), RunState(3, 3, {"epoch": 0}, {}, BufferState(3)))
    return folder.root


def test_resume_goes_on_with_the_options_of_the_run(old_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, words)))
    words = ["run.num_steps=200", "trainer.optim.lr=1e-3"]
    assert main(["resume", str(old_run), *words]) == 0
    ((config, told),) = calls
    assert told == words
    expected = load_run_config([*READY[1:], "run.seed=7", "model.hf_config.rope_theta=5.0", *words])
    assert replace(config, run=replace(config.run, resume=None)) == expected
    assert config.run.resume == str(old_run)


def test_resume_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relative paths of the options are from where the run was started; a word of the command names what is here."""
    began, here = tmp_path / "began", tmp_path / "here"
    for folder in (began, here):
        folder.mkdir()
    row = json.dumps({"prompt": "a", "answer": "a"}) + "\n"
    (began / "prompts.jsonl").write_text(row)
    (began / "reward.py").write_text("def score(prompt, response, fields):\n    return 0.5\n")
    (here / "other.jsonl").write_text(row)
    monkeypatch.chdir(began)
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        write_description(folder, config, words)
        (folder.checkpoints / "step-000003").parent.mkdir(exist_ok=True)
        store = CheckpointStore(folder.checkpoints, keep=2, options=fingerprint(config))
        store.finish(store.begin(3), RunState(3, 3, {"epoch": 0}, {}, BufferState(3)))

    fake_run(monkeypatch, run)
    own = ["data.path=prompts.jsonl", "data.eval_path=prompts.jsonl", "reward.kind=reward.py:score"]
    assert main([*READY, "reward=exact_match", *own]) == 0
    calls: list[Any] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, folder)))
    monkeypatch.chdir(here)
    assert main(["resume", str(opened[0].root), "data.eval_path=other.jsonl"]) == 0
    assert f"relative paths of the run's options start at {began}" in capsys.readouterr().err
    ((config, folder),) = calls
    assert (config.data.path, config.data.eval_path, Path.cwd()) == ("prompts.jsonl", str(here / "other.jsonl"), began)
    assert folder.root == opened[0].root
    (began / "reward.py").unlink()
    monkeypatch.chdir(here)
    assert main(["resume", str(opened[0].root)]) == 2
    assert f"there is no file {began / 'reward.py'}" in capsys.readouterr().err


def test_a_run_that_fails_after_its_last_step_is_not_told_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        with alive(folder.root):
            store = CheckpointStore(folder.checkpoints, keep=1, options=fingerprint(config))
            store.finish(store.begin(2), RunState(2, 0, {}, {}, BufferState(2)))
            raise TrainingStopped("no episode had a reward")

    fake_run(monkeypatch, run)
    assert main([*READY, "run.num_steps=2"]) == 1
    said = capsys.readouterr().err
    assert (
        "All 2 steps are made, so a resume has nothing left to train: start again with slipstream train, or raise"
        in said
    )
    assert "Go on from" not in said and said.endswith(" run.num_steps=MORE\n")
    assert main([*READY, "run.num_steps=3"]) == 1
    assert "Go on from step 2: slipstream resume " in capsys.readouterr().err


def test_resume_without_starting_says_what_it_would_do(
    old_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("the run was started"))
    assert main(["resume", str(old_run), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "goes on from step 3\n" in said and f"a checkpoint of {old_run}\n" in said
    assert main(["resume", str(old_run), "run.num_steps=9", "--dry-run"]) == 0
    assert re.search(r"goes on from step 3, with another run.num_steps: \d+ before, 9 now\n", capsys.readouterr().out)
    assert main(["resume", str(old_run), "run.num_steps=9", "--cfg", "job"]) == 0
    assert load_resolved_yaml(capsys.readouterr().out).run.num_steps == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "slipstream resume needs a run folder, e.g. slipstream resume runs/latest"),
        (["run.num_steps=9"], "slipstream resume needs a run folder"),
        (["nowhere"], "nowhere is not a run folder"),
        (["old run", "trainer=full"], "trainer=full: the run has its options already, and takes no presets"),
        (["old run", "run.resume=x"], "run.resume has no effect with slipstream resume"),
        (["old run", "run.dir=x"], "run.dir has no effect with slipstream resume"),
        (["old run", "run.num_step=4"], "unknown option run.num_step. Did you mean run.num_steps?"),
        (["old run", "run.num_steps=2"], "has done 3 steps, and run.num_steps=2: nothing is left to train"),
        (["old run", "trainer.lora.rank=8"], "trainer.lora.rank: 16 there, 8 now"),
        (["old run", "--dryrun"], "unknown flag --dryrun"),
    ],
)
def test_resume_refuses(
    words: list[str],
    message: str,
    old_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("the run was started"))
    assert main(["resume", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("stop", "is not a run folder"),
        ("recover", "is not a run folder"),
        ("merge", "is not a run folder"),
        ("resume", "is not a run folder"),
        ("eval", "is neither a run folder"),
    ],
)
def test_a_folder_may_have_an_equals_sign(
    command: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lr=1e-4"
    folder.mkdir()
    assert main([command, str(folder)]) == 2
    err = capsys.readouterr().err
    assert "lr=1e-4" in err and found in err


@pytest.mark.parametrize("saved", [b"run: {num_steps: 3", b"\xff\xfe", b"run: {no_such_option: 1}", b"run"])
def test_a_run_whose_options_cannot_be_read_is_not_resumed(
    saved: bytes, old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old_run / "config.yaml").write_bytes(saved)
    assert main(["resume", str(old_run)]) == 2
    err = capsys.readouterr().err
    assert str(old_run / "config.yaml") in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_that_still_looks_at_files(
    signum: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "slipstream.orchestrator.inputs.preflight.run_preflight", lambda config: signal.raise_signal(signum)
    )
    assert main(READY) == code
    assert capsys.readouterr().err == "\nstopped.\n"


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_wind_the_run_down(
    signum: signal.Signals,
    code: int,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wound_down: list[bool] = []

    async def train() -> None:
        try:
            signal.raise_signal(signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # teardown may await: the loop still runs
            wound_down.append(True)

    def run(*_: Any) -> None:
        if is_async:
            asyncio.run(train())
            return
        try:
            signal.raise_signal(signum)
        finally:
            wound_down.append(True)

    before = signal.getsignal(signal.SIGTERM)
    fake_run(monkeypatch, run)
    assert main(READY) == code
    assert wound_down
    assert "Traceback" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_background_job_that_ignores_interrupts_can_be_wound_down() -> None:
    """A shell starts `command &` with SIGINT ignored; asyncio then installs no handler of its own. One process that has
    imported what a run needs is forked for each signal.
    """
    program = (
        "import asyncio, os, signal, sys, types\n"
        "from slipstream.orchestrator.cli.main import main\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup
        "async def train(signum):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signum)\n"
        "        await asyncio.wait_for(asyncio.Event().wait(), 30)\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        print(signum, 'wound down', flush=True)\n"
        f"assert main({[*READY, '--dry-run']!r}) == 0\n"
        "module = sys.modules['slipstream.orchestrator.run'] = types.ModuleType('slipstream.orchestrator.run')\n"
        "for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    module.run = lambda *_: asyncio.run(train(signum))\n"
        "    if not (child := os.fork()):\n"
        f"        os._exit(main({READY!r}))\n"
        "    print(signum, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = "2 wound down\n2 130\n15 wound down\n15 143\n1 wound down\n1 129\n"
    assert (done.returncode, done.stdout[-len(said) :]) == (0, said), done.stderr


def test_nohup_survives_a_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fake_run(monkeypatch, lambda *_: signal.raise_signal(signal.SIGHUP))
        assert main(READY) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that sees this source tree."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "vllm", "transformers", "mooncake"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


def test_help_config_and_controller_need_no_heavy_library() -> None:
    code = BLOCK + (
        "import slipstream.orchestrator.loop.controller, slipstream.orchestrator.run\n"
        "from slipstream.orchestrator.cli.main import main\n"
        "assert main(['train', '--help']) == 0\n"
        "assert main(['train', 'experiment=quickstart', '--cfg', 'job']) == 0\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
        "del sys.meta_path[0]\n"
        "import slipstream.orchestrator.cluster.placement\n"  # with Ray
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_missing_base_package_is_one_message() -> None:
    # None in sys.modules makes the import raise ModuleNotFoundError.
    code = "import sys; sys.modules['hydra'] = None; from slipstream.orchestrator.cli.main import main; "
    done = run_python(code + "sys.exit(main(['train', 'experiment=quickstart']))")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this environment lacks hydra; run `make setup`, then see: slipstream doctor\n"


def test_help_loads_neither_hydra_nor_numpy() -> None:
    """What makes `--help` answer at once: a list of modules, not a stopwatch."""
    code = (
        "import sys; from slipstream.orchestrator.cli.main import main; main(['--help']); main(['train', '--help'])\n"
        "assert not {'hydra', 'omegaconf', 'numpy', 'torch', 'ray', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("x"), 1)])
def test_a_terminal_that_has_gone_leaves_the_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise error

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    fake_run(monkeypatch, end)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(READY) == code


def test_a_reader_that_has_gone_is_no_error() -> None:
    """`slipstream doctor | head -3` in a script that looks at exit codes. rich has an opinion of its own on it."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    code = (
        "import sys; from slipstream.orchestrator.cli import doctor, main\n"
        "doctor.gather = lambda *_: [doctor.Finding('limits', 'files', '10', doctor.Status.ok)] * 99\n"
        "sys.exit(main.main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m slipstream.orchestrator.cli.main train --help options | head -1"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stderr == ""
