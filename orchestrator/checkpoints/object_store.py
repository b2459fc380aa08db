"""A run's folder in an object store: what of a run outlives its machines (run.checkpoint_dir), and the thread that
sends complete checkpoints there, beside the steps that follow.

    <run.checkpoint_dir>/NAME/
      owner                               which process goes on with the run (files/may_write.py)
      config.yaml, environment.json, ...  as in the run's own folder, as of the newest checkpoint
      step-000050/                        as in the run's own folder (run_checkpoint.py)

    CheckpointStore.finish --offer--> the newest that waits --> ObjectStore.send, prune --> checkpoints/remote.json

    {"url": "s3://bucket/runs/NAME", "step": 40, "problem": ""}     the newest one there, and what the last try met

Owns: these names and files, what is asked of fsspec, what its errors mean to people, how often is tried. Does not own:
what is in a checkpoint, credentials: drivers of fsspec read them from the environment. Invariants: a checkpoint has a
manifest only while all its other files are there: it is sent last, and removed first. Files pass through in parts,
however large they are. A process whose run another one goes on with sends and removes nothing more. One checkpoint is
sent at a time, and stays on disk meanwhile; of several that wait the newest is sent. One in the store is removed only
after a newer one is complete there. What fails is said and tried again with the next checkpoint: a run does not end for
it, since its checkpoints are on its own disk.
"""

from __future__ import annotations

import glob
import json
import logging
import threading
import time
import uuid
from asyncio import AbstractEventLoop
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager, suppress
from functools import cached_property, partial, wraps
from pathlib import Path, PurePosixPath
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from slipstream.conf.failures import in_daemon_thread, in_words
from slipstream.conf.json_files import JsonObject, object_or_empty
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.errors import ObjectStoreError
from slipstream.orchestrator.files.may_write import THIS_PROCESS, check_word

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MANIFEST = "manifest.json"
CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
_OWNER = "owner"
RECORDS = ("metrics.jsonl", "evaluations.jsonl", "startup.jsonl", "checkpoints/best.json")
"""Files of a run's folder that a resume on another machine goes on with."""
_OPTIONS = {
    "file": {"auto_mkdir": True},
    "s3": {"max_concurrency": 4, "config_kwargs": {"read_timeout": 120, "retries": {"max_attempts": 1}}},
}
"""What drivers are told. S3's holds so many parts of a file in memory at once, of 50 MB, twice. An answer may take as
long as what the kernel has still to send does on a slow line, and a server puts large files together: 15 s, the
driver's own limit, were too few at 0.2 MB/s. It tries five times itself, each time twice.
"""
ANSWER_S = 60.0
"""Longest wait for the answer to a small request."""
_CURES = {
    "NoCredentialsError": "give credentials as the driver looks for them: for S3 AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the machine's role",
    "PermissionError": "its credentials must be allowed to list, read, write and delete there",
    "FileNotFoundError": "a run makes no bucket",
    "ImportError": "for s3:// pip install 'slipstream-rl[s3]', for gs:// pip install gcsfs, for abfs:// pip install "
    "adlfs",
    "ValueError: Protocol not known": "give s3://, gs://, abfs://, file:// or another that fsspec knows",
    "EndpointConnectionError": "another address than Amazon's is AWS_ENDPOINT_URL",
}
"""How an error begins -> what to do."""


def _soon(ask: Callable[Concatenate[ObjectStore, P], T]) -> Callable[Concatenate[ObjectStore, P], T]:
    """A small request, which is given up when there is no answer: drivers try for many minutes, and say nothing."""

    @wraps(ask)
    def asked(store: ObjectStore, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return in_daemon_thread(partial(ask, store, *args, **kwargs)).result(ANSWER_S)
        except TimeoutError as error:
            raise ObjectStoreError(f"{store.url} has not answered within {ANSWER_S:.0f} s") from error

    return asked


class ObjectStore:
    """See the module's docstring. `url`: of the run's folder, or for check() of any folder."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """fsspec's file system, and the folder's path in it."""
        from fsspec.core import url_to_fs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

        fs, root = cast("tuple[Any, str]", url_to_fs(self.url, **_OPTIONS.get(self.url.partition("://")[0], {})))
        if fs.async_impl:  # what nobody awaits of its tasks when a server goes away; their errors are raised as well
            fs.loop.set_exception_handler(_note_in_the_log)
        return fs, root

    @_soon
    def check(self) -> None:
        """Write, list, read and remove a small object. Raises ObjectStoreError: as all that follow."""
        with self._speaking("cannot be written") as (fs, root):
            folder = f"{root}/.slipstream-{uuid.uuid4().hex}"
            fs.pipe_file(f"{folder}/probe", b"{}")
            if not fs.ls(folder, detail=False) or fs.cat_file(f"{folder}/probe") != b"{}":
                raise OSError("what was written does not come back")
            _remove(fs, folder)

    @_soon
    def claim(self) -> None:
        """From now on this process goes on with the run, and no other one."""
        with self._speaking("cannot be written") as (fs, root):
            fs.pipe_file(f"{root}/{_OWNER}", THIS_PROCESS.encode())

    @property
    def owner(self) -> str:
        """Which process goes on with the run; empty: none has begun."""
        return self.text(_OWNER) or ""

    def check_own(self) -> None:
        check_word(self.owner, self.url)

    @_soon
    def folders(self) -> list[str]:
        with self._speaking("cannot be listed") as (fs, root):
            return sorted(PurePosixPath(path).name for path in fs.ls(root, detail=False))

    @_soon
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        with self._speaking("cannot be listed") as (fs, root):
            found = fs.glob(f"{glob.escape(root)}/step-*/{MANIFEST}")
            return sorted(step for path in found if (step := _step(PurePosixPath(path).parent.name)) is not None)

    @_soon
    def text(self, name: str) -> str | None:
        """The text of a small file; None if it is not there."""
        with self._speaking(f"cannot be read ({name})") as (fs, root):
            path = f"{root}/{name}"
            return fs.cat_file(path).decode() if fs.exists(path) else None

    def document(self, name: str, step: int | None = None) -> JsonObject:
        """A JSON file of the run, or of a checkpoint; empty where there is none."""
        path = name if step is None else f"{_name(step)}/{name}"
        with self._speaking(f"cannot be read ({path})"):
            return object_or_empty(json.loads(self.text(path) or "{}"))

    def send(self, checkpoint: Path, attempt: Callable[[Callable[[], None]], None]) -> None:
        """Send a complete checkpoint, and the files of its run that a resume needs. `attempt`: calls what it gets, and
        again where that fails."""
        run = checkpoint.parent.parent
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MANIFEST]
        files += [path for name in (CONFIG, ENVIRONMENT, *RECORDS) if (path := run / name).is_file()]
        for path in [*files, checkpoint / MANIFEST]:
            name = path.relative_to(checkpoint.parent if checkpoint in path.parents else run)
            attempt(partial(self._put, path, str(name)))

    def _put(self, path: Path, name: str) -> None:
        self.check_own()
        with self._speaking(f"cannot be written ({name})") as (fs, root):
            fs.put_file(str(path), f"{root}/{name}")

    def take(self, step: int, into: Path) -> None:
        """Fetch a checkpoint's files into a folder, its manifest last."""
        names = [str(name) for name in self.document(MANIFEST, step).get("files", ())]
        for name in names:
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise ObjectStoreError(f"{self.url}/{_name(step)}/{MANIFEST} lists {name!r}, outside of its folder")
        for name in [*names, MANIFEST]:
            self._get(f"{_name(step)}/{name}", into / name)

    def take_files(self, names: Iterable[str], run: Path) -> None:
        """Fetch files of the run, as far as they are there."""
        for name in names:
            self._get(name, run / name)

    def _get(self, name: str, path: Path) -> None:
        with self._speaking(f"cannot be read ({name})") as (fs, root):
            if fs.exists(f"{root}/{name}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{name}", str(path))

    def prune(self, *, keep: int, spared: Iterable[int]) -> None:
        """Remove all but the newest, those that are spared, and what an upload that broke off has left before them."""
        self.check_own()
        complete = self.steps()
        kept = {*complete[-keep:], *spared}
        with self._speaking("cannot be pruned") as (fs, root):
            for name in self.folders():
                step = _step(name)
                if step is None or step in kept or step > complete[-1]:
                    continue
                if step in complete:
                    fs.rm_file(f"{root}/{name}/{MANIFEST}")
                _remove(fs, f"{root}/{name}")

    @contextmanager
    def _speaking(self, what: str) -> Generator[tuple[Any, str]]:
        """fsspec's drivers raise whatever their libraries do."""
        try:
            fs, root = self._place
            fs.invalidate_cache()
            yield fs, root
        except ObjectStoreError:
            raise
        except Exception as error:
            said = in_words(error)
            cure = "".join(f"; {cure}" for begin, cure in _CURES.items() if said.startswith(begin))
            raise ObjectStoreError(f"{self.url} {what}: {said}{cure}") from error


def _remove(fs: Any, folder: str) -> None:
    """Remove a folder and nothing else: rm() of all drivers but the local disk's takes it for a pattern, which other
    runs' folders may match."""
    from fsspec.implementations.local import LocalFileSystem  # pyright: ignore[reportMissingTypeStubs]

    if fs.protocol == LocalFileSystem.protocol or not glob.has_magic(folder):
        fs.rm(folder, recursive=True)
    else:
        for file in fs.find(folder):
            fs.rm_file(file)


def _note_in_the_log(_: AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.debug("%s: %r", context.get("message"), context.get("exception"))


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(name: str) -> int | None:
    number = name.removeprefix("step-")
    return int(number) if number != name and number.isdecimal() else None


PAUSES_S = (1.0, 4.0, 16.0, 64.0)
"""Between one try to send a file and the next, beside what drivers try by themselves."""
CLOSE_S = 900.0
"""Longest that a run's end waits for its last checkpoint to be sent."""
CHECK_S = 5.0
"""Longest that a new checkpoint waits for the store to say whose the run is."""
_SAY_EVERY_S = 30.0


class CheckpointUploads:
    """The thread, and its record, remote.json. `spared`: the steps whose checkpoints stay, however old they are."""

    def __init__(self, store: ObjectStore, record: Path, *, keep: int, spared: Callable[[], Set[int]]) -> None:
        self.store = store
        self._record, self._keep, self._spared = record, keep, spared
        self._waiting: Path | None = None
        self._sending: Path | None = None
        self._step: int | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="sends checkpoints", daemon=True)

    def begin(self, steps: list[int]) -> None:
        """Start. These are complete in the store."""
        self._step = max(steps, default=None)
        self._write("")
        self._thread.start()

    def offer(self, checkpoint: Path) -> None:
        """Send a complete checkpoint as soon as the one before it is there. Raises RunTakenOver, if the store says so
        at once: one that hangs must not hold up the run.
        """
        with suppress(ObjectStoreError, TimeoutError):  # the thread says so
            in_daemon_thread(self.store.check_own).result(CHECK_S)
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()

    def needs(self, checkpoint: Path) -> bool:
        """Whether a checkpoint has to stay on disk, because it is still to be sent."""
        return checkpoint in (self._waiting, self._sending)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until what was offered is sent, or could not be."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        until_s = time.monotonic() + timeout_s
        while self._thread.is_alive():
            self._thread.join(min(_SAY_EVERY_S, max(0.0, until_s - time.monotonic())))
            if self._thread.is_alive():
                checkpoint = self._sending or self._waiting
                logger.warning("waiting for %s to be in %s", checkpoint and checkpoint.name, self.store.url)
                if time.monotonic() >= until_s:
                    return

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
                self._sending, self._waiting = self._waiting, None
            if self._sending is None:
                return
            self._send(self._sending)
            self._sending = None

    def _send(self, checkpoint: Path) -> None:
        began_s = time.monotonic()
        try:
            self.store.send(checkpoint, self._attempt)
            self._step = int(checkpoint.name.removeprefix("step-"))
            self._write("")
            logger.info("checkpoint: %s/%s, after %.1f s", self.store.url, checkpoint.name, time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 - the thread serves the next checkpoint, whatever became of this one
            logger.warning("%s is on this machine's disk alone: %s; tried again with the next one", checkpoint, error)
            self._write(str(error))
            return
        try:
            self.store.prune(keep=self._keep, spared=self._spared())
        except Exception as error:  # noqa: BLE001 - the same
            logger.warning("older checkpoints stay in %s until the next one is there: %s", self.store.url, error)

    def _attempt(self, send: Callable[[], None]) -> None:
        for pause_s in PAUSES_S:
            try:
                return send()
            except ObjectStoreError as error:
                logger.info("tried again in %.0f s: %s", pause_s, error)
                time.sleep(pause_s)
        return send()

    def _write(self, problem: str) -> None:
        try:
            write_whole(self._record, json.dumps({"url": self.store.url, "step": self._step, "problem": problem}))
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._record, error)
