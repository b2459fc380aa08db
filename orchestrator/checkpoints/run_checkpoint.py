"""The run's state on disk: written atomically, refused when damaged, exact when read back.

    checkpoints/step-000050/
      state.json       step, policy version, prompt cursor, random generators, fingerprint of the options
      groups.jsonl     finished groups that no step has consumed, and prompts that were in flight
      trainer/         one set of files per rank: trainable parameters, optimizer, generators (the trainer writes it)
      adapter/         trainer.mode=lora: the adapter in PEFT format, to be served or looked at; no resume reads it
      manifest.json    size and CRC-32 of every other file; its presence under the final name means "complete"

    begin(step) -> .step-000050.partial/ --trainer writes--> finish(): state, manifest, fsync, rename -> step-000050/

With run.checkpoint_dir complete ones are sent to an object store, and a resume fetches one that is newer there.

Owns: the format above, atomicity, how many are kept, and the check of a checkpoint against a resumed run's options.
Does not own: the manifest (manifest.py), the lines of a state (loop_state.py), what the trainer's files contain, how
they are sent (object_store.py). Invariant: a folder named step-* was complete when it got its name, and the run's rows
were on the disk; a crash at any time, also of the machine, leaves the previous one intact.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, object_in, object_or_empty
from slipstream.conf.schema import Order, RunConfig, TrainMode
from slipstream.orchestrator.checkpoints.loop_state import RunState, lines_of, state_of
from slipstream.orchestrator.checkpoints.manifest import FORMAT, fsync, read_json, verify, write_manifest
from slipstream.orchestrator.checkpoints.object_store import MANIFEST, RECORDS, CheckpointUploads, ObjectStore
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.errors import CheckpointError, TrainingStopped
from slipstream.orchestrator.files.may_write import check_own, is_own
from slipstream.orchestrator.files.run_folder import RunFolder, flatten, to_plain

logger = logging.getLogger(__name__)

_FILES = frozenset({"model.path", "model.tokenizer", "data.path", "data.sources"})
"""Options in the fingerprint that name files of the user's, whose content it does not know."""


def named_checkpoints(folder: Path) -> list[Path]:
    """Folders of a run folder's `checkpoints` with the name of a complete one, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[len("step-") :].isdecimal())


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints: a copy that broke off, or somebody's hand, leaves a name without a manifest."""
    return [path for path in named_checkpoints(folder) if (path / MANIFEST).is_file()]


def hold(checkpoint: Path) -> bool:
    """Have the run leave a complete checkpoint where it is until this process ends. False: it has gone meanwhile."""
    with suppress(FileNotFoundError):
        fcntl.flock(os.open(checkpoint / MANIFEST, os.O_RDONLY), fcntl.LOCK_SH)  # never closed: the lock would end
        return (checkpoint / MANIFEST).is_file()
    return False


def step_of(path: Path | None) -> int:
    """The step in a checkpoint's name; 0 for None, the start of a run."""
    return int(path.name.removeprefix("step-")) if path is not None else 0


def has_nothing_left(folder: RunFolder, num_steps: int) -> bool:
    """Whether a run that has ended has made its steps, so that a resume would train nothing. One that was ended before
    it exported what it has trained is resumed for that, unless it judged itself to have failed: a resume would turn
    that into a success. An export alone proves nothing: it may be of an earlier part of the run.
    """
    complete = complete_checkpoints(folder.checkpoints)
    step = step_of(complete[-1]) if complete else 0
    if step != num_steps or step == 0:
        return step > num_steps
    has_export = folder.adapter.is_dir() or folder.merged.is_dir()
    try:
        said = (folder.root / "control" / "end.json").read_text().strip()
        end = json.loads(said) if said else {"state": "killed", "error": None}
        return (has_export and end["state"] == "finished") or str(end["error"]).startswith(
            f"{TrainingStopped.__name__}:"
        )
    except (OSError, ValueError, KeyError, TypeError):  # another user's, or of a release that did not write it down
        return has_export


def how_to_go_on(folder: RunFolder, num_steps: object) -> str:
    """What is saved of a run that has ended, and what to do for more of it."""
    complete = complete_checkpoints(folder.checkpoints)
    if not complete:
        return "there is no checkpoint (run.checkpoint_every_steps) to go on from: start it again"
    if isinstance(num_steps, int) and has_nothing_left(folder, num_steps):
        return (
            f"all {num_steps} steps are made, so a resume has nothing left to train: start again with "
            f"slipstream train, or raise run.num_steps: {folder.how_to_resume} run.num_steps=MORE"
        )
    return f"step {step_of(complete[-1])} is saved; go on with: {folder.how_to_resume}"


def checkpoints_of(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    """The checkpoints of a run with these options, in its folder and in its object store."""
    url = config.run.checkpoint_dir
    return CheckpointStore(
        folder.checkpoints,
        keep=config.run.keep_checkpoints,
        options=fingerprint(config),
        remote=None if url is None else ObjectStore(f"{url.rstrip('/')}/{folder.run_id}"),
    )


@dataclass(frozen=True, slots=True)
class Resumable:
    """A checkpoint that a resume would go on from."""

    step: int
    prompts: JsonObject
    """Its cursor of the prompt stream."""
    damaged: tuple[str, ...] = ()
    """What is wrong with newer ones."""


class CheckpointStore:
    """See the module's docstring. `keep`: how many complete checkpoints stay; older ones are removed after a new one is
    complete. `options`: `fingerprint` of this run's options."""

    def __init__(self, folder: Path, *, keep: int, options: JsonObject, remote: ObjectStore | None = None) -> None:
        self.folder, self._run = folder, RunFolder(folder.parent)
        self.spared: set[int] = set()
        """Steps whose checkpoints stay, however old they are."""
        self._keep = keep
        self._options = options
        self._remote = remote
        self._uploads: CheckpointUploads | None = None

    def begin_sending(self) -> None:
        """From here on send each complete checkpoint to the object store, if there is one; and the newest one now.
        Raises ConfigError: it is another run's, which has checkpoints there, or began before this one's first row."""
        record = self.folder / "remote.json"
        if self._remote is None:
            record.unlink(missing_ok=True)  # of an earlier part of the run
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        steps, newest = self._remote.steps(), self.newest()
        if steps and newest is None:
            raise ConfigError(
                f"{self._remote.url} holds checkpoints of another run of this name, up to step {steps[-1]}; choose "
                f"another run.name, or go on with that run: slipstream resume {self._remote.url}"
            )
        if newest is None and not self._run.metrics.exists() and (owner := self._remote.owner):
            raise ConfigError(
                f"{self._remote.url} is the place of another run of this name, of {owner}, which began in the same "
                "second in another run.dir; start this one again, or choose another run.name"
            )
        self._remote.claim()
        self._uploads = CheckpointUploads(self._remote, record, keep=self._keep, spared=lambda: set(self.spared))
        self._uploads.begin(steps)
        if newest is not None and step_of(newest) not in steps:
            self._uploads.offer(newest)

    def finish_sending(self) -> None:
        if self._uploads is not None:
            self._uploads.close()

    def newest(self) -> Path | None:
        complete = complete_checkpoints(self.folder)
        return complete[-1] if complete else None

    def of_step(self, step: int) -> Path | None:
        return next((path for path in complete_checkpoints(self.folder) if step_of(path) == step), None)

    def to_resume(self, resume: str | None) -> Path | None:
        """The newest whole checkpoint of the run that run.resume names; None when it is not set. Damaged ones that are
        newer lose their name, so that a later step may take it.
        """
        if resume is None:
            return None
        if self._remote is not None:
            self._fetch_newer(self._remote, resume)
        whole, damaged = self.newest_whole(resume)
        for path, problem in damaged.items():
            logger.warning("%s; going on from the checkpoint before it, %s", problem, whole.name)
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.move(path, aside)
        return whole

    def prompts_of(self, checkpoint: Path) -> JsonObject:
        """The cursor of the prompt stream of a whole one (loop_state.RunState.prompts)."""
        return read_json(checkpoint / "state.json")["prompts"]

    def step_to_resume(self, resume: str) -> Resumable:
        """What to_resume() would return. Nothing is fetched or renamed. Raises CheckpointError: there is none, or it is
        of a run with other options."""
        newest = 0 if self._remote is None else max(self._remote.steps(), default=0)
        if self._remote is not None and newest > self._newest_whole_step(resume):
            saved = self._remote.document("state.json", newest)
            self._check_options(f"step {newest} in {self._remote.url}", saved.get("options", {}))
            return Resumable(newest, saved.get("prompts", {}))
        whole, damaged = self.newest_whole(resume)
        state = self.read(whole)
        return Resumable(state.step, state.prompts, tuple(damaged.values()))

    def _newest_whole_step(self, resume: str) -> int:
        try:
            return step_of(self.newest_whole(resume)[0])
        except CheckpointError:
            return 0

    def _fetch_newer(self, remote: ObjectStore, resume: str) -> None:
        """Have the newest whole checkpoint of the object store here, unless one that is here is as new."""
        remote.claim()  # from here on whoever had it sends nothing there
        here = self._newest_whole_step(resume)
        for step in reversed([step for step in remote.steps() if step > here]):
            if (partial := self._fetch(remote, step)) is not None:
                remote.take_files(RECORDS, self.folder.parent)  # before the name: who finds one fetches nothing
                best = object_in(self.folder / "best.json").get("step") or 0
                is_missing = best != step and best in remote.steps() and self.of_step(best) is None
                if is_missing and (kept := self._fetch(remote, best)) is not None:
                    self._put(kept, best)
                self._put(partial, step)
                return

    def _fetch(self, remote: ObjectStore, step: int) -> Path | None:
        """A checkpoint of the object store, under a temporary name; None: it is not whole."""
        logger.info("fetching step %d from %s", step, remote.url)
        partial = self.begin(step)
        remote.take(step, partial)
        try:
            verify(partial)
        except CheckpointError as error:
            logger.warning("step %d in %s is not whole: %s", step, remote.url, error)
            self.discard(partial)
            return None
        return partial

    def _put(self, partial: Path, step: int) -> Path:
        """Give a checkpoint its name. One that has it is not complete: it is damaged, or somebody took files out."""
        final = self.folder / f"step-{step:06d}"
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        fsync(self.folder)
        return final

    def newest_whole(self, resume: str) -> tuple[Path, dict[Path, str]]:
        """The newest checkpoint whose files are as its manifest says, and what is wrong with each newer one. Raises
        CheckpointError: there is none."""
        damaged: dict[Path, str] = {}
        for path in reversed(named_checkpoints(self.folder)):
            try:
                verify(path)
            except CheckpointError as error:
                damaged[path] = str(error)
            else:
                return path, damaged
        if damaged:
            listed = "; ".join(damaged.values())
            raise CheckpointError(f"run.resume={resume} holds no whole checkpoint: {listed}; start a new run instead")
        raise CheckpointError(
            f"run.resume={resume} holds no complete checkpoint (checkpoints/step-*); start a new run instead"
        )

    def begin(self, step: int) -> Path:
        """An empty folder under a temporary name; trainer ranks write into its `trainer/`. Raises RunTakenOver."""
        check_own(self._run)
        partial = self.folder / f".step-{step:06d}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        (partial / "trainer").mkdir(parents=True)
        return partial

    def finish(self, partial: Path, state: RunState) -> Path:
        """Add the run's state, make all files durable, name the folder, and remove the oldest. Returns the path. Raises
        RunTakenOver: nothing was changed; or, of the run in the object store, the checkpoint is here alone."""
        check_own(self._run)
        head, rows = lines_of(state)
        (partial / "groups.jsonl").write_text(rows)
        (partial / "state.json").write_text(json.dumps({"format": FORMAT, **head, "options": self._options}, indent=2))
        write_manifest(partial)
        run = self._run
        for file in (run.config, run.metrics, run.evaluations, run.timeline, run.samples, run.startup):
            if file.is_file():
                fsync(file)
        final = self._put(partial, state.step)
        if self._uploads is not None:
            self._uploads.offer(final)
        self.prune()
        return final

    def prune(self) -> None:
        """Remove all but the newest, and those that are spared or held; these at the next call. One that goes loses its
        name first: nobody finds half of it.
        """
        for old in complete_checkpoints(self.folder)[: -self._keep]:
            if step_of(old) in self.spared or (self._uploads and self._uploads.needs(old)):
                continue
            with (old / MANIFEST).open("r+b") as manifest, suppress(BlockingIOError):
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.discard(self._without_its_name(old))

    def _without_its_name(self, old: Path) -> Path:
        try:
            return old.rename(self.folder / f".{old.name}.removed")
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        (old / MANIFEST).unlink()  # a folder in the image of a container cannot be renamed
        return old

    def discard_unfinished(self) -> None:
        """Remove what a controller began to write, or to remove, that was killed."""
        for partial in self.folder.glob(".step-*"):
            self.discard(partial)

    def discard(self, partial: Path) -> None:
        """Remove what has no name of a checkpoint."""
        if is_own(self._run):
            shutil.rmtree(partial, ignore_errors=True)

    def read(self, path: Path) -> RunState:
        """Verify a checkpoint; compare it with this run's options; return its state. Raises CheckpointError: a file is
        missing or damaged, the format is another one, or an option differs."""
        verify(path)
        raw = read_json(path / "state.json")
        if raw.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {raw.get('format')}, this version reads {FORMAT}")
        self._check_options(str(path), object_or_empty(raw.get("options")))
        with (path / "groups.jsonl").open() as rows:
            return state_of(raw, rows)

    def _check_options(self, path: str, saved: JsonObject) -> None:
        if saved.keys() != self._options.keys():
            raise CheckpointError(
                f"{path} is of another version of Slipstream, and goes on with that one: environment.json names its "
                "commit"
            )
        mine, theirs = dict(flatten(self._options)), dict(flatten(saved))
        differing = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        if differing:
            listed = ", ".join(f"{key}: {theirs.get(key)!r} there, {mine.get(key)!r} now" for key in differing)
            cure = "use the same ones to resume"
            if _FILES.intersection(differing):
                cure += "; put a file or folder that has moved, or a link to it, where it was"
            raise CheckpointError(f"{path} belongs to a run with other options ({listed}); {cure}")


def fingerprint(config: RunConfig) -> JsonObject:
    """The options that a checkpoint's content depends on. Any other option may change between two parts of a run."""
    trainer = config.trainer
    algorithm = config.algorithm
    return to_plain(
        {
            "model": asdict(config.model),
            "mla_norm_eps": trainer.numerics.places.mla_norm_eps,
            "trainer.num_ranks": trainer.num_ranks,
            "trainer.ep_size": trainer.ep_size,
            "trainer.mode": trainer.mode,
            "trainer.lora": asdict(trainer.lora) if trainer.mode is TrainMode.lora else None,
            "trainer.train_router": trainer.train_router,
            "trainer.optim.state": trainer.optim.state,
            "device": resolve_device(config.cluster.device),
            "algorithm.objective": algorithm.objective,
            "algorithm.sequences_per_step": algorithm.sequences_per_step,
            "algorithm.group_size": algorithm.group_size,
            "algorithm.groups_per_step": algorithm.groups_per_step,
            "algorithm.distill_coef > 0": algorithm.distill_coef > 0,  # waiting groups have the teacher's word
            "data.path": config.data.path,
            "data.sources": list(config.data.sources),
            "data.weights": list(config.data.weights),
            "data.columns": dict(config.data.columns),
            "data.chat_template_kwargs": dict(config.data.chat_template_kwargs),
            "data.stream": config.data.stream,
            "data.drop_too_long": config.data.drop_too_long,
            "data.order=middling": config.data.order is Order.middling,
            "run.seed": config.run.seed,
            "parity.replay_routing": config.parity.replay_routing,
        }
    )
