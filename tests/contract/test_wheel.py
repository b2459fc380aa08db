"""The wheel, installed in an environment of its own, where a user has packages of the names that our folders have."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "fleet", "orchestrator", "rollout", "trainer", "weight_sync")


def uv(*words: str | Path) -> None:
    command = [Path(sys.executable).with_name("uv"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, as git has it."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS, "slipstream", "pyproject.toml", "README.md"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    words = ["build", "-q", "--wheel", "--no-build-isolation", "--python", sys.executable]
    uv(*words, "--out-dir", folder / "out", folder)
    (built,) = (folder / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In an environment with the wheel and the packages that this one has, but none of its editable installs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=240)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    uv("pip", "install", "-q", "--no-deps", "--offline", "--python", folder / "bin" / "python", wheel)
    return folder / "bin"


@pytest.fixture(scope="module")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a package of every name that a folder of the checkout has."""
    folder = tmp_path_factory.mktemp("users")
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("IS_MINE = True\n")
    return folder


def run(scripts: Path, folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder), "VLLM_NO_USAGE_STATS": "1"}
    command = [str(scripts / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_has_one_name_at_the_top_and_every_file_that_is_read(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"slipstream"}
    words = ["git", "ls-files", *FOLDERS]
    read = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(read) > 50
    assert [name for name in read if f"slipstream/{name}" not in names] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("doctor",), "A run can work here"),
        (("push", "--help"), "slipstream push CHECKPOINT --start N"),
        (("train", "experiment=agent_game", "--cfg", "job"), "slipstream.rollout.agents.games.letters:play"),
    ],
)
def test_commands_work_beside_a_users_packages_of_the_folders_names(
    scripts: Path, users_folder: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in run(scripts, users_folder, "slipstream", *words)


def test_the_plugin_is_an_entry_point_of_vllms_and_the_user_has_his_own_packages(
    scripts: Path, users_folder: Path
) -> None:
    """That vLLM loads it: test_push_vllm.py."""
    code = f"""
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="slipstream")
import {", ".join(FOLDERS)}
print(all(module.IS_MINE for module in ({", ".join(FOLDERS)})))
print(point.load().__code__.co_filename)
"""
    is_mine, place = run(scripts, users_folder, "python", "-c", code).split()
    assert is_mine == "True"
    assert place.startswith(str(scripts.parent))
