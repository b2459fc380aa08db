"""Checks of run.loggers before anything starts: the packages are there, and W&B has a key.

Owns: what a user can repair here. Does not own: values of single options (conf/schema/run.py), services that are
away (orchestrator/files/loggers.py). Nothing is asked over the network.
"""

import importlib.util
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.inputs.facts import Fact

_WITHOUT_A_DATABASE = ("", "file", "http", "https", "databricks")
_WANDB_MODES = ("online", "offline", "shared", "disabled", "run", "dryrun")
_WITHOUT_A_KEY = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE that wandb knows, and those with which it sends nothing."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_loggers(config: RunConfig) -> Fact:
    loggers = config.run.loggers
    for name in loggers:
        if importlib.util.find_spec(name) is None:
            how = "pip install tensorboard" if name == "tensorboard" else f"pip install 'slipstream-rl[{name}]'"
            raise ConfigError(f"run.loggers names {name}, which is not installed: {how}, or remove it from run.loggers")
    mode = _wandb_mode() if "wandb" in loggers else "offline"
    if mode not in _WITHOUT_A_KEY and not _has_key():
        raise ConfigError(
            "run.loggers names wandb, which has no key here: call `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline"
        )
    if "mlflow" in loggers:
        place = os.environ.get("MLFLOW_TRACKING_URI") or ""
        scheme = urlsplit(place).scheme
        if scheme not in _WITHOUT_A_DATABASE and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(
                f"MLflow's client alone reaches no {scheme} database: give MLFLOW_TRACKING_URI a server's address or a "
                "folder, or pip install mlflow"
            )
    said = [f"{name} ({mode})" if name == "wandb" else name for name in loggers]
    return Fact("loggers", ", ".join(["metrics.jsonl", *said]))


def _wandb_mode() -> str:
    """What wandb reads in the environment."""
    mode = os.environ.get("WANDB_MODE") or "online"
    if mode not in _WANDB_MODES:
        raise ConfigError(f"WANDB_MODE={mode} is no mode of W&B ({', '.join(_WANDB_MODES)}); unset it")
    return mode


def _has_key() -> bool:
    """Whether wandb finds a key: in the environment, in ~/.netrc, or maybe on a server of its own settings."""
    if any(os.environ.get(name) for name in _KEYS) or (Path.home() / ".config" / "wandb" / "settings").exists():
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"):
        if path and Path(path).is_file():
            try:
                return netrc.netrc(path).authenticators(host) is not None
            except (netrc.NetrcParseError, OSError):
                continue
    return False
