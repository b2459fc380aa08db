"""A thread that sends complete checkpoints to an object store, beside the steps that follow.

    CheckpointStore.finish --offer--> the newest that waits --> ObjectStore.send, prune --> checkpoints/remote.json

    {"url": "s3://bucket/runs/NAME", "step": 40, "problem": ""}     the newest one there, and what the last try met

Owns: the thread, how often it tries, that file. Does not own: what is sent (object_store.py).
Invariants: one checkpoint is sent at a time, and stays on disk meanwhile; of several that wait the newest is sent. A
checkpoint in the store is removed only after a newer one is complete there. What fails is said and tried again with the
next checkpoint: a run does not end for it, since its checkpoints are on its own disk.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

from slipstream.conf.failures import in_daemon_thread
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.checkpoints.object_store import ObjectStore
from slipstream.orchestrator.errors import ObjectStoreError

logger = logging.getLogger(__name__)

PAUSES_S = (1.0, 4.0, 16.0, 64.0)
"""Between one try to send a file and the next, beside what drivers try by themselves."""
CLOSE_S = 900.0
"""Longest that a run's end waits for its last checkpoint to be sent."""
CHECK_S = 5.0
"""Longest that a new checkpoint waits for the store to say whose the run is."""
_SAY_EVERY_S = 30.0


class CheckpointUploads:
    """See the module's docstring.

    Args:
        store: the run's folder there.
        record: remote.json.
        keep: how many checkpoints stay there.
        spared: says the steps whose checkpoints stay, however old they are.
    """

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
        """Whether it is about to be sent, and has to stay on disk."""
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
