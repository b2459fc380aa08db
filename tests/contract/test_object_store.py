"""Checkpoints in an object store: a real server of S3's protocol, a process of its own, and fsspec's driver for it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from cases.held_port import held_port

from slipstream.conf.schema import RunConfig, RunSection
from slipstream.orchestrator.checkpoints import object_store
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.object_store import ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, checkpoints_of, step_of
from slipstream.orchestrator.errors import ObjectStoreError
from slipstream.orchestrator.files.run_folder import RunFolder

BUCKET = "bucket"
BYTES = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with held_port() as port:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                while socket.socket().connect_ex(("127.0.0.1", port)):
                    assert process.poll() is None
                    time.sleep(0.05)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """Credentials in the environment, and an empty bucket."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(object_store, "PAUSES_S", (0.01,))
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir(BUCKET)
    yield files
    if files.exists(BUCKET):
        files.rm(BUCKET, recursive=True)


def checkpoints_in(run: Path, *, keep: int = 2) -> CheckpointStore:
    config = RunConfig(run=RunSection(checkpoint_dir=f"s3://{BUCKET}/runs", keep_checkpoints=keep))
    return checkpoints_of(config, RunFolder(run))


def write(checkpoints: CheckpointStore, step: int) -> Path:
    partial = checkpoints.begin(step)
    (partial / "trainer" / "rank-0.safetensors").write_bytes(bytes([step]) * BYTES)
    (checkpoints.folder.parent / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(step + 1)))
    return checkpoints.finish(partial, RunState(step, step, {}, {}, BufferState()))


def send(run: Path, *steps: int) -> CheckpointStore:
    """Write checkpoints of these steps, each of them sent before the next one is written."""
    checkpoints = checkpoints_in(run)
    for step in steps:
        checkpoints.begin_sending()
        write(checkpoints, step)
        checkpoints.finish_sending()
    return checkpoints


def there(bucket: s3fs.S3FileSystem) -> set[str]:
    """What lies in the run's folder there."""
    return {path.split("/")[3] for path in bucket.find(f"{BUCKET}/runs/run-1")}


def test_another_machine_goes_on_from_the_newest_checkpoint(bucket: s3fs.S3FileSystem, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/runs/run-1"
    send(tmp_path / "first" / "run-1", 5, 10, 15)
    assert there(bucket) == {"step-000010", "step-000015", "metrics.jsonl", "owner"}
    second = checkpoints_in(tmp_path / "second" / "run-1")
    assert (second.step_to_resume(url).step, second.step_to_resume(url).damaged) == (15, ())
    assert not second.folder.exists()
    path = second.to_resume(url)
    assert path is not None and step_of(path) == 15
    assert (path / "trainer" / "rank-0.safetensors").read_bytes() == bytes([15]) * BYTES
    assert second.read(path).policy_version == 15
    assert len((second.folder.parent / "metrics.jsonl").read_text().splitlines()) == 16


def test_an_upload_that_is_killed_half_way_leaves_the_one_before(bucket: s3fs.S3FileSystem, tmp_path: Path) -> None:
    run, url = tmp_path / "run-1", f"s3://{BUCKET}/runs/run-1"
    send(run, 5)
    half = write(checkpoints_in(run), 10)
    dying = (
        "import os, pathlib, sys\n"
        "from slipstream.orchestrator.checkpoints.object_store import ObjectStore\n"
        "def once(send):\n"
        "    send()\n"
        "    os.kill(os.getpid(), 9)\n"
        "store = ObjectStore(sys.argv[1])\n"
        "store.claim()\n"
        "store.send(pathlib.Path(sys.argv[2]), once)\n"
    )
    died = subprocess.run([sys.executable, "-c", dying, url, half], check=False, env=os.environ)
    assert died.returncode == -9
    bucket.invalidate_cache()
    assert "step-000010" in there(bucket)  # a part of it
    elsewhere = checkpoints_in(tmp_path / "elsewhere" / "run-1")
    assert elsewhere.step_to_resume(url).step == 5
    assert step_of(elsewhere.to_resume(url)) == 5
    shutil.rmtree(half)
    send(run, 15)  # which sweeps up what broke off
    assert there(bucket) == {"step-000005", "step-000015", "metrics.jsonl", "owner"}


def test_a_bucket_that_vanishes_costs_no_checkpoint_of_the_run(bucket: s3fs.S3FileSystem, tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    checkpoints = checkpoints_in(run)
    checkpoints.begin_sending()
    bucket.rm(BUCKET, recursive=True)
    path = write(checkpoints, 5)
    checkpoints.finish_sending()
    record = (run / "checkpoints" / "remote.json").read_text()
    assert '"step": null' in record and "FileNotFoundError" in record and "a run makes no bucket" in record
    assert checkpoints.read(path).step == 5
    bucket.mkdir(BUCKET)
    again = checkpoints_in(run)
    again.begin_sending()  # what is not there yet is sent at the start
    again.finish_sending()
    assert ObjectStore(f"s3://{BUCKET}/runs/run-1").steps() == [5]


def test_what_cannot_be_written_is_said_with_its_cure(
    bucket: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObjectStore(f"s3://{BUCKET}/runs").check()
    assert bucket.find(BUCKET) == []
    with pytest.raises(ObjectStoreError, match=r"cannot be written.*a run makes no bucket"):
        ObjectStore("s3://no-such-bucket/runs").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ObjectStoreError, match="Unable to locate credentials; give credentials as the driver"):
        ObjectStore(f"s3://{BUCKET}/runs").check()
