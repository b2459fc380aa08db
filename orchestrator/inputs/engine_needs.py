"""What an engine of a family needs of an environment, beside what set-up installs. Loads neither vLLM nor torch.

Owns: packages that vLLM's file of a family imports, and what compiles DeepGEMM's kernels. Does not own which family
needs what (`conf/architecture/families.py`). preflight.py calls check_engine_needs() where the run starts: its nodes
have the same environment.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from slipstream.conf.architecture.families import family_of, kind_of
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.schema import Device


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
