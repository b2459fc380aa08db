"""Locks: recipes are valid for the tools that read them, they start the run that was asked for or go on with it, and
every mistake is one message.
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings as hypothesis_settings, strategies as st

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.launch.command import LaunchOptions, Shape, Target, launch, shape_of

SCHEMAS = Path(__file__).parents[3] / "cases" / "launch_schemas"
RECIPES = ("qwen3_30b_a3b_2gpu", "qwen3_30b_a3b_2h200", "qwen3_30b_a3b_8gpu", "kimi_k2_thinking_32gpu")
HOSTILE = ["model=checkpoint", 'model.path="/shared/its $(here); `x`"', "data=files", 'data.path="/shared/a b.jsonl"']


def schema(name: str) -> dict[str, Any]:
    return json.loads(lzma.decompress((SCHEMAS / f"{name}.json.xz").read_bytes()))


def refusing_unknown(node: Any) -> Any:
    """A schema of Kubernetes that refuses fields it does not know, as `kubectl apply` does."""
    if isinstance(node, list):
        return [refusing_unknown(one) for one in node]
    if not isinstance(node, dict):
        return node
    closed = {key: refusing_unknown(value) for key, value in node.items()}
    is_object = isinstance(node.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in node
    return closed | ({"additionalProperties": False} if is_object and node.get("type") == "object" else {})


def recipe(target: Target, experiment: str, *words: str, **options: Any) -> str:
    words = (f"experiment={experiment}", *words)
    volume = {} if target is Target.slurm else {"volume": "models"}
    text, _ = launch(load_run_config(list(words)), words, LaunchOptions(target=target, **volume, **options))
    return text


@pytest.mark.parametrize("experiment", RECIPES)
def test_rayjobs_are_valid(experiment: str) -> None:
    config_map, job = yaml.safe_load_all(recipe(Target.kuberay, experiment, namespace="ml", gpu_type="H200"))
    validator = jsonschema.Draft202012Validator(refusing_unknown(schema("rayjob")))
    validator.validate(job)
    assert config_map["metadata"] == job["metadata"] == {"name": experiment.replace("_", "-"), "namespace": "ml"}
    cluster = job["spec"]["rayClusterSpec"]
    heads, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert sum(group["replicas"] for group in workers) == {"kimi_k2_thinking_32gpu": 3}.get(experiment, 0)
    size = heads["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert size["nvidia.com/gpu"] == {"qwen3_30b_a3b_2gpu": "2", "qwen3_30b_a3b_2h200": "2"}.get(experiment, "8")
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolice"):
        validator.validate(job)


@pytest.mark.parametrize("experiment", RECIPES)
def test_tasks_of_skypilot_are_valid(experiment: str) -> None:
    task = yaml.safe_load(recipe(Target.skypilot, experiment))
    schemas = schema("skypilot")
    jsonschema.Draft7Validator(schemas["task"]).validate(task)
    jsonschema.Draft7Validator(schemas["resources"]).validate(task["resources"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schemas["task"]).validate(task | {"num_node": 2})
    assert task["num_nodes"] == {"kimi_k2_thinking_32gpu": 4}.get(experiment, 1)
    assert task["volumes"] == {"/shared": "models"}


@pytest.mark.parametrize("target", list(Target))
def test_scripts_have_no_fault_that_shellcheck_knows(target: Target, tmp_path: Path) -> None:
    """All recipes of a target in one call, which takes most of its time to start."""
    files: list[str] = []
    for experiment in RECIPES:
        text = recipe(target, experiment, *HOSTILE)
        if target is Target.kuberay:
            text = "#!/bin/bash\n" + next(yaml.safe_load_all(text))["data"]["run.sh"]
        elif target is Target.skypilot:
            text = "#!/bin/bash\n" + yaml.safe_load(text)["run"]
        file = tmp_path / f"{experiment}.sh"
        file.write_text(text)
        files.append(str(file))
        subprocess.run(["bash", "-n", str(file)], check=True)
    # SC2016: what stands in single quotes is a user's word, or code for another program.
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    subprocess.run([shellcheck, "--exclude=SC2016", "--severity=style", *files], check=True)


FAKE = """#!/bin/bash
if [ "$(basename "$0")" = scontrol ]; then echo "scontrol $*" >> "$CALLS"; exit; fi
for word in "$@"; do printf '%s\\n' "$word" >> "$CALLS"; done
echo -- >> "$CALLS"
trap 'exit 143' TERM
if [ -n "$SLOW" ]; then touch "$CALLS.up"; while :; do sleep 0.05; done; fi
"""


def test_a_slurm_job_starts_the_run_goes_on_with_it_and_queues_itself_again(tmp_path: Path) -> None:
    """The script itself, run by bash, with a `slipstream` and a `scontrol` that write down how they are called."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("slipstream", "scontrol"):
        (venv / "bin" / name).write_text(FAKE)
        (venv / "bin" / name).chmod(0o755)
    script = tmp_path / "job.sh"
    words = ["experiment=qwen3_30b_a3b_2gpu", *HOSTILE]
    script.write_text(recipe(Target.slurm, words[0].removeprefix("experiment="), *HOSTILE, venv=venv))
    calls = tmp_path / "calls"
    environment = {**os.environ, "SLURM_JOB_ID": "17", "CALLS": str(calls), "SLOW": ""}

    def run(**more: str) -> list[str]:
        calls.unlink(missing_ok=True)
        subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment | more, check=True, timeout=240)
        return calls.read_text().splitlines()

    assert run() == ["train", *words, "run.dir=runs", "run.name=qwen3-30b-a3b-2gpu-17", "--"]
    for number, step in (("17", "000010"), ("17", "000020"), ("171", "000090")):
        folder = tmp_path / f"runs/qwen3-30b-a3b-2gpu-{number}-20260131-120000/checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    assert run() == ["resume", "runs/qwen3-30b-a3b-2gpu-17-20260131-120000", "--"]

    # Also where the run has ended before the script goes on.
    slow_kill = {"BASH_FUNC_kill%%": '() { builtin kill "$@" && { [ "$1" != -TERM ] || sleep 0.5; }; }'}
    for more in ({}, slow_kill):
        calls.unlink()
        Path(f"{calls}.up").unlink(missing_ok=True)
        with subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=environment | {"SLOW": "1"} | more) as job:
            while not Path(f"{calls}.up").exists():
                assert job.poll() is None
            os.kill(job.pid, 10)  # SIGUSR1: out of time soon
            assert job.wait(60) == 143
        assert calls.read_text().splitlines()[-1] == "scontrol requeue 17"


@pytest.mark.parametrize(
    "folder", ["/a b", "/l,r", "/o'x", '/x"y', "/{b}", "/(c)", "/d: e", "/f\\", '/g\\"h', "/\u00fc"]
)
def test_the_job_puts_its_runs_where_it_was_told(folder: str) -> None:
    """Whatever signs the folder has that mean something to bash, or in an option."""
    config = load_run_config(["experiment=quickstart"])
    config = replace(config, run=replace(config.run, dir=folder))
    text, _ = launch(config, ["experiment=quickstart"], LaunchOptions(target=Target.kuberay))
    script = next(yaml.safe_load_all(text))["data"]["run.sh"].replace("exec slipstream", "printf '%s\\n'")
    words = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    assert words[0] == "train" and load_run_config(words[1:]).run.dir == folder


EIGHT = load_run_config(["experiment=qwen3_30b_a3b_8gpu"])


@given(
    ranks=st.integers(1, 64),
    workers=st.integers(1, 16),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    per_gpu=st.integers(1, 4),
    gpus=st.sampled_from([4, 8]),
)
@hypothesis_settings(max_examples=60)
def test_machines_hold_the_run_and_are_as_few_as_possible(
    ranks: int, workers: int, tp_size: int, per_gpu: int, gpus: int
) -> None:
    if tp_size > gpus:
        return
    per_gpu = per_gpu if tp_size == 1 else 1
    config = replace(
        EIGHT,
        trainer=replace(EIGHT.trainer, num_ranks=ranks, ep_size=1),
        rollout=replace(EIGHT.rollout, num_workers=workers * per_gpu, tp_size=tp_size, workers_per_gpu=per_gpu),
    )
    shape = shape_of(config, gpus)

    def fits(num_nodes: int, gpus: int) -> bool:
        free = [gpus] * num_nodes
        for size in [tp_size] * workers + [1] * ranks:
            node = next((i for i, left in enumerate(free) if left >= size), None)
            if node is None:
                return False
            free[node] -= size
        return True

    assert fits(shape.nodes, shape.gpus)
    assert shape.nodes == 1 or not fits(shape.nodes - 1, gpus)
    assert shape.nodes > 1 or not fits(1, shape.gpus - 1)


def test_a_range_gets_machines_for_the_fewest_engines() -> None:
    of_a_range = replace(EIGHT, rollout=replace(EIGHT.rollout, num_workers="2..9"))
    assert shape_of(of_a_range, 8) == shape_of(replace(EIGHT, rollout=replace(EIGHT.rollout, num_workers=2)), 8)


def test_runs_without_engines_and_on_cpus() -> None:
    sft = load_run_config(["experiment=arithmetic_sft_gpu"])
    assert shape_of(sft, 8) == Shape(1, sft.trainer.num_ranks, sft.trainer.num_ranks)
    assert shape_of(load_run_config(["experiment=quickstart", "cluster.device=cpu"]), 8) == Shape(1, 0, 4)
    assert shape_of(load_run_config(["experiment=quickstart_one_gpu"]), 8).gpus == 1


QWEN = ["experiment=qwen3_30b_a3b_2gpu"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurms", *QWEN], "slipstream launch needs a target, one of slurm, kuberay, skypilot, got 'slurms'"),
        (QWEN, "slipstream launch needs a target"),
        (["slurm", "experiment=qwen"], "Did you mean qwen3"),
        (["slurm", *QWEN, "rollout.tp_size=16"], "rollout.tp_size=16 does not fit a machine of 8 GPUs"),
        (["slurm", *QWEN, "run.resume=runs/latest"], "run.resume has no effect with slipstream launch"),
        (["slurm", *QWEN, "cluster.ray_address=auto"], "cluster.ray_address has no effect with slipstream launch"),
        (["slurm", *QWEN, "--gpus-per-node=0"], "--gpus-per-node must be >= 1, got 0"),
        (["slurm", *QWEN, "--time-limit=2h"], "--time-limit must be HH:MM:SS or D-HH:MM:SS, got '2h'"),
        (["slurm", *QWEN, "--volume=x"], "--volume has no effect with slurm; it is for kuberay and skypilot"),
        (["slurm", *QWEN, "--name=A_b"], "--name must be at most 40 of a-z, 0-9 and -, got 'A_b'"),
        (["slurm", *QWEN, "--gpu-type=$(x)"], "--gpu-type must be a name, got '$(x)'"),
        (["slurm", *QWEN, "--gpu-typ=x"], "Did you mean --gpu-type?"),
        (["slurm", *QWEN, "--output=nowhere/x"], "--output nowhere/x cannot be written: No such file or directory"),
        (["kuberay", *QWEN], "kuberay needs --volume"),
        (["kuberay", *QWEN, "--volume=x", "--mount=/"], "--mount must be an absolute path below /, got /"),
        (["kuberay", *QWEN, "--volume=x", "--namespace=A"], "--namespace must be a name of Kubernetes"),
        (["kuberay", *QWEN, "--volume=x", "--time-limit=1:00:00"], "--time-limit has no effect with kuberay"),
        (["skypilot", *QWEN, "--volume=x", "model=checkpoint", "model.path=models/q"], "model.path=models/q is relati"),
        (["skypilot", *QWEN, "--volume=x", "--namespace=a"], "--namespace has no effect with skypilot"),
    ],
)
def test_mistakes(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert not list(tmp_path.iterdir())
