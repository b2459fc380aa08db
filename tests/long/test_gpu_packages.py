"""The packages for GPUs on a host without one, as a cluster's login node is: they install, and what needs no GPU works.

Each Python that is there installs 12 GB from a fresh clone, which are removed again; two minutes of a core.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.checkpoints import CONFIGS, FOR_GPUS
from fakes.run_folders import MadeUpRun

from slipstream.orchestrator.machine import HERE

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12")
MODELS = ("qwen3_moe", "deepseek_v3")
pytestmark = pytest.mark.timeout(1800)


class LoginNode:
    """A clone with the packages for GPUs, made with one Python; what set-up said; how commands are called there."""

    def __init__(self, clone: Path, python: str) -> None:
        self.clone = clone
        bin_folder = clone.parent / "bin"
        bin_folder.mkdir()
        for other in (*(f"python{version}" for version in PYTHONS if version != python), "python3"):
            (bin_folder / other).write_text("#!/bin/sh\nexit 1\n")  # set-up finds this Python alone
            (bin_folder / other).chmod(0o755)
        path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
        self._env = os.environ | {
            "PATH": path,
            "SLIPSTREAM_TARGET": "gpu",
            "XDG_CACHE_HOME": str(clone.parent / "cache"),
        }
        self._env.pop("PYTHONPATH", None)
        self.setup = self.call("requirements/setup.sh", timeout_s=1200)
        assert self.setup.returncode == 0, self.setup.stdout + self.setup.stderr

    def call(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.clone, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def slipstream(self, *words: str) -> str:
        """What a command prints that ends well."""
        done = self.call(".venv/bin/slipstream", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=PYTHONS)
def login(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    if HERE.count_gpus():
        pytest.skip("this host has GPUs")
    if subprocess.run(["sh", "-c", f"python{request.param} -V"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {request.param} here")
    folder = tmp_path_factory.mktemp("login")
    subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True, timeout=60)
    try:
        yield LoginNode(folder / "clone", request.param)
    finally:
        shutil.rmtree(folder)


def test_set_up_ends_with_what_doctor_finds(login: LoginNode) -> None:
    assert login.setup.stdout.splitlines()[-1].startswith("Nothing to repair; no run can work here without a GPU")
    assert login.call("requirements/setup.sh").stdout == "", "nothing changed"
    report = json.loads(login.slipstream("doctor", "--json"))
    assert not report["usable"]
    assert [finding for finding in report["findings"] if finding["status"] == "fail"] == []


@pytest.mark.parametrize("model", MODELS)
def test_layouts_are_those_that_the_build_for_cpus_records_for_gpus(
    login: LoginNode, model: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[model], **FOR_GPUS[model], "torch_dtype": "bfloat16"}))
    words = ["record", str(tmp_path), "--tp", "2", "--json"]
    here = subprocess.run(
        [Path(sys.executable).parent / "slipstream", *words, "--layout-cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    ours, theirs = json.loads(here.stdout), json.loads(login.slipstream(*words))
    assert theirs["engine"].startswith("vllm 0.25")
    assert theirs["digest"] == ours["digest"]


def test_what_needs_no_gpu_works(login: LoginNode, tmp_path: Path) -> None:
    assert "Predicted publish" in login.slipstream("plan", "experiment=quickstart", "--output", str(tmp_path / "plan"))
    words = ["slurm", "experiment=quickstart_gpu", "--output", str(tmp_path / "job")]
    login.slipstream("launch", *words)
    assert "#SBATCH" in (tmp_path / "job").read_text()
    run = MadeUpRun(tmp_path / "run", num_steps=2)
    for step in range(2):
        run.write_step(step)
    assert "2" in login.slipstream("status", str(tmp_path / "run"))
    login.slipstream("view", str(tmp_path / "run"), "--export", str(tmp_path / "run.html"))
    assert (tmp_path / "run.html").stat().st_size > 1000


def test_a_run_says_that_no_gpu_is_there(login: LoginNode) -> None:
    for command in (["train", "experiment=quickstart"], ["train", "experiment=quickstart", "cluster.device=cpu"]):
        done = login.call(".venv/bin/slipstream", *command)
        assert done.returncode == 2
        assert "whose engines run on GPUs alone" in done.stderr
        assert "Traceback" not in done.stderr


def test_one_list_serves_both_pythons(tmp_path: Path) -> None:
    lock = ROOT / "requirements/gpu.lock"
    for python in PYTHONS:
        file = shutil.copy(lock, tmp_path / "again.lock")  # its versions are preferred
        words = "--generate-hashes --no-header --no-annotate --python-platform x86_64-manylinux_2_28"
        uv = [Path(sys.executable).parent / "uv", "pip", "compile", "-q", *words.split(), "--python-version", python]
        subprocess.run([*uv, ROOT / "requirements/gpu.in", "-o", file], check=True, timeout=300)
        assert Path(file).read_text() == lock.read_text(), python
