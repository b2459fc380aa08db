"""requirements/setup.sh: which .venv it takes for its own. Environments are real but have no pip: packages end it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("requirements/cpu.lock", "requirements/uv.lock", "pyproject.toml", "requirements/setup.sh")
BASE = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = f"""#!/bin/sh
[ "$2" = venv ] || exec {BASE} "$@"
{BASE} -m venv --without-pip "$3" && sed -i 's/ --without-pip//' "$3/pyvenv.cfg"
"""


@pytest.fixture(autouse=True)
def _an_interpreter_that_makes_environments_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python3.11", "python3.12"):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(PYTHON)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    monkeypatch.setenv("SLIPSTREAM_TARGET", "cpu")


def checkout_with_environment(folder: Path) -> Path:
    """What set-up leaves behind, without the packages."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["python3.11", "-m", "venv", ".venv"], cwd=folder, check=True, timeout=240)
    (site,) = folder.glob(".venv/lib/python3*/site-packages")
    (site / "pip").mkdir()
    (site / "pip/__main__.py").touch()
    digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in FILES)).hexdigest()
    (folder / ".venv/.slipstream-stamp").write_text(f"{digest[:16]}-cpu\n")
    return folder


def set_up(folder: Path) -> str:
    """What the script says, as make runs it: nothing when all is there."""
    done = subprocess.run([folder / "requirements/setup.sh"], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stdout + done.stderr


def is_made_for(folder: Path) -> bool:
    """Whether `source .venv/bin/activate` and the scripts beside it mean this folder."""
    return f"{folder}/.venv" in (folder / ".venv/bin/activate").read_text()


def test_an_environment_that_was_moved_with_its_checkout_is_made_again(tmp_path: Path) -> None:
    checkout = checkout_with_environment(tmp_path / "before")
    assert set_up(checkout) == ""
    moved = checkout.rename(tmp_path / "after")
    assert not is_made_for(moved)
    assert "could not install uv" in set_up(moved)
    assert is_made_for(moved)
    assert "could not install uv" in set_up(moved)  # not ready before its packages are there


def test_an_environment_linked_from_another_checkout_is_used_while_its_packages_are_the_same(tmp_path: Path) -> None:
    other = checkout_with_environment(tmp_path / "other")
    linked = tmp_path / "linked"
    shutil.copytree(other, linked, ignore=shutil.ignore_patterns(".venv"))
    (linked / ".venv").symlink_to(other / ".venv")
    assert set_up(linked) == ""
    (linked / "pyproject.toml").write_text("# other packages\n")
    assert "could not install uv" in set_up(linked)
    assert is_made_for(linked)
    assert is_made_for(other)
    assert set_up(other) == ""


TOOLS = {
    "id": "echo {uid}",
    "ldd": """
for library in {missing}; do
  [ -e {folder}/installed ] || ls .venv/lib/python3*/*/*.libs/$library >/dev/null 2>&1 || echo "$library => not found"
done""",
    "apt-get": """
case "$*" in
  *-s*) echo "Inst ibverbs-providers (44.0)"; echo "Inst libnl-3-200 (3.7)" ;;
  download*) touch ibverbs-providers.deb libnl-3-200.deb ;;
  install*) echo "$@" >{folder}/installed ;;
esac""",
    "dpkg": """
case "$2" in *ibverbs*) name=libmlx5.so.1 ;; *) name=libnl-3.so.200 ;; esac
mkdir -p "$3/usr/lib" && touch "$3/usr/lib/$name"
""",
}  # fmt: skip
"""Stand-ins for what looks for libraries and installs them."""


def on_path(folder: Path, missing: str, uid: int) -> None:
    for name, script in TOOLS.items():
        for old, new in {"{missing}": missing, "{uid}": str(uid), "{folder}": str(folder)}.items():
            script = script.replace(old, new)
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)


def test_libraries_that_the_transport_links_are_installed_with_root(tmp_path: Path) -> None:
    on_path(tmp_path, "libmlx5.so.1 libcuda.so.1", uid=0)
    said = set_up(checkout_with_environment(tmp_path / "checkout"))
    assert "installing ibverbs-providers" in said
    assert (tmp_path / "installed").read_text().split()[-1] == "ibverbs-providers"


def test_libraries_that_the_transport_links_are_unpacked_without_root(tmp_path: Path) -> None:
    on_path(tmp_path, "libmlx5.so.1 libcuda.so.1", uid=1000)
    checkout = checkout_with_environment(tmp_path / "checkout")
    (site,) = checkout.glob(".venv/lib/python3*/site-packages")
    libraries = site / "mooncake_transfer_engine_cuda13.libs"
    libraries.mkdir()
    assert "unpacking ibverbs-providers" in set_up(checkout)
    assert {file.name for file in libraries.iterdir()} == {"libmlx5.so.1", "libnl-3.so.200"}
    assert set_up(checkout) == ""


def test_the_driver_of_gpus_is_not_looked_for(tmp_path: Path) -> None:
    on_path(tmp_path, "libcuda.so.1", uid=0)
    assert set_up(checkout_with_environment(tmp_path / "checkout")) == ""


@pytest.mark.parametrize(("verdict", "code"), [("1 to repair before a run can work", 1), ("A run can work here", 0)])
def test_set_up_ends_with_what_doctor_finds(tmp_path: Path, verdict: str, code: int) -> None:
    checkout = checkout_with_environment(tmp_path / "checkout")
    stamp = checkout / ".venv/.slipstream-stamp"
    stamp.unlink()
    for name, script in {"uv": "true", "slipstream": f"echo {verdict}; exit {code}"}.items():
        (checkout / ".venv/bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (checkout / ".venv/bin" / name).chmod(0o755)
    said = set_up(checkout)
    assert verdict in said
    assert stamp.exists() == (code == 0)
    assert said.strip().endswith(verdict) == (code == 0)
    assert ("not ready" in said) == (code != 0)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_image_has_every_library_that_set_up_would_install(name: str) -> None:
    (pairs,) = re.findall(r"package_of=\((.*)\)", (ROOT / "requirements/setup.sh").read_text())
    packages = {pair.partition("=")[2] for pair in pairs.split()} - ({"ibverbs-providers"} if name == "cpu" else set())
    assert packages <= set((ROOT / f"docker/{name}.Dockerfile").read_text().split())


@pytest.mark.parametrize("name", ["cpu", "gpu", "uv"])
def test_every_package_of_a_lock_has_a_version_and_a_hash(name: str) -> None:
    entries = (ROOT / f"requirements/{name}.lock").read_text().replace("\\\n", " ").splitlines()
    assert entries
    for entry in entries:
        package, *hashes = entry.split()
        assert "==" in package, entry
        assert hashes, f"{package} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), package
