"""Checks of what the run's environment must have: packages, what engines of a family need, where rows are logged.

Owns: what a user can repair here. Nothing is asked over the network, and neither vLLM nor torch is loaded. Does not own
which family needs what (`conf/architecture/families.py`).
"""

import importlib.util
import netrc
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.conf.architecture.families import family_of, kind_of
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.options import did_you_mean
from slipstream.conf.schema import Device, RunConfig
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.rollout.engine.engine_options import known_arguments

_PACKAGES = ("torch", "vllm", "ray", "mooncake", "transformers", "safetensors")
_WITHOUT_A_DATABASE = ("", "file", "http", "https", "databricks")
_WANDB_MODES = ("online", "offline", "shared", "disabled", "run", "dryrun")
_WITHOUT_A_KEY = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE that wandb knows, and those with which it sends nothing."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_packages(config: RunConfig) -> Fact:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this environment lacks {', '.join(missing)}: install Slipstream with its extra, "
            f"slipstream-rl[{'gpu' if config.cluster.device is Device.cuda else 'cpu'}], or run `make setup`"
        )
    known = known_arguments() if config.rollout.engine_options else None
    for name in config.rollout.engine_options:
        if known is not None and name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"rollout.engine_options.{name}: this vLLM's engine has no such argument. {hint}".rstrip()
            )
    return Fact("packages", "present (versions: slipstream doctor)")


def check_engine_needs(hf_config: HfConfig, device: Device) -> None:
    """Refuse a model whose engine could not start here, or would end with its first prefill."""
    family = family_of(hf_config)
    for name in family.engine_imports:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"vLLM's file of model_type={kind_of(hf_config)} imports {name}, which this environment lacks: install "
                "the build that belongs to its torch (beside the pinned packages of CPUs: .venv/bin/pip install "
                "--no-deps --index-url https://download.pytorch.org/whl/cpu torchvision==0.28.0+cpu)"
            )
    if family.needs_deep_gemm and device is Device.cuda:
        lacks = [
            lack
            for lack, is_here in (
                ("DeepGEMM with its headers (deep_gemm, or vllm/third_party/deep_gemm)", _has_headers()),
                (f"nvcc at {_nvcc()} (set CUDA_HOME to the CUDA toolkit's folder)", _nvcc().is_file()),
            )
            if not is_here
        ]
        if lacks:
            raise ConfigError(
                f"engines of model_type={kind_of(hf_config)} choose keys by kernels that DeepGEMM compiles when they "
                f"start, and this environment lacks {' and '.join(lacks)}; install what is missing, or choose another "
                "model"
            )


def _has_headers() -> bool:
    """Whether a DeepGEMM that vLLM would take is here with what its kernels are compiled from."""
    return any(
        Path(folder, *inside, "include", "deep_gemm").is_dir()
        for package, inside in (("deep_gemm", ()), ("vllm", ("third_party", "deep_gemm")))
        if (found := importlib.util.find_spec(package)) is not None
        for folder in found.submodule_search_locations or ()
    )


def _nvcc() -> Path:
    """CUDA's compiler, where DeepGEMM looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")) is not None:
        return Path(found)
    return Path(home or "/usr/local/cuda", "bin", "nvcc")


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
