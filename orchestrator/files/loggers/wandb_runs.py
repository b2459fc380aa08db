"""Rows of metrics in Weights & Biases (https://docs.wandb.ai).

Owns: what W&B is told. It gets numbers, the run's options and nothing else: no console, no code, no git remote, no
facts about the machine. Does not own: when rows are sent (background.py). Invariant: the key stays where wandb reads
it, in WANDB_API_KEY or ~/.netrc; no file of the run has it.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.orchestrator.files.loggers.run_start import RunStart

CONNECT_TIMEOUT_S = 10.0
"""Longest that a connection may take before rows are kept and it is tried again; a run may wait as long to end."""


class WandbRun:
    """One run of W&B, in the mode of WANDB_MODE. Offline it is a folder, RUN/wandb/offline-run-*, for `wandb sync`."""

    def __init__(self, project: str, start: RunStart, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._settings = wandb.Settings(
            silent=True,
            init_timeout=CONNECT_TIMEOUT_S,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        team, _, project = project.rpartition("/")
        self._run: Any = wandb.init(
            project=project,
            entity=team or None,
            name=start.name,
            group=start.group,
            config=dict(start.options),
            dir=str(folder),
            reinit="create_new",
            settings=self._settings,
        )

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, timeout_s: float) -> None:
        """End the run of W&B, once its rows have arrived or after timeout_s."""
        self._run.settings.finish_timeout = timeout_s
        self._run.finish()
