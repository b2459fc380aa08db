"""Unsloth as a row of bench/trainer.py: its loader, patches, checkpointing and adapters around the bench's own weights.

    python3 -m pip install --no-deps --target SITE unsloth==2026.10.9 unsloth_zoo==2026.10.9 bitsandbytes==0.50.2 \\
        trl==1.15.0 datasets==4.8.5 dill==0.4.1 multiprocess==0.70.19 cut_cross_entropy==25.1.1 \\
        tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0
    python bench/trainer.py --tokens 4096 --rows peft-bfloat16 unsloth-bfloat16 --unsloth SITE

Unsloth 2026.10.9 takes transformers up to 5.17 and torch up to 2.14, and loads only from a folder. It gets one with a
config, a tokenizer of two words and a safetensors file of a single tensor: transformers draws the missing tensors on
the device, and the bench overwrites them. Unsloth must be imported before transformers and PEFT, so it has a process
of its own. There SITE replaces PYTHONPATH: on a path with vLLM, Unsloth would import and patch vLLM, too. Without an
accelerator Unsloth uses plain transformers and PEFT, and the row shows only that it loads.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Fill = Callable[[Any, dict[str, Any], str], None]
"""Copies the bench's weights into a transformers model: (model, config, device)."""
NOTE = (
    "Unsloth's split-LoRA experts on torch's grouped_mm, its compiled modules, chunked loss and activation checkpoints "
    'kept in host memory (use_gradient_checkpointing="unsloth", its default); torch.optim.AdamW(fused) as in the PEFT '
    "rows instead of its own 8-bit AdamW; "
)
NOTES = {
    "bfloat16": "adapters cast to bfloat16, which Unsloth makes float32",
    "float32": "adapters in float32 under bfloat16 autocast, as Unsloth trains them",
}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "a", "eos_token": "a", "pad_token": "b"}


class Unsloth:
    """FastLanguageModel with LoRA on the parameters that the PEFT rows train.

    Raises:
        ImportError: Unsloth, or something that it needs, is not installed.
    """

    def __init__(self, config: dict[str, Any], state: str, args: argparse.Namespace, fill: Fill) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unsloth-")
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "UNSLOTH_DISABLE_STATISTICS": "1",
            "UNSLOTH_COMPILE_LOCATION": f"{self._folder.name}/compiled",
        }
        import torch
        from unsloth import FastLanguageModel  # before transformers and peft: it patches them

        model, _ = FastLanguageModel.from_pretrained(
            str(_checkpoint(Path(self._folder.name) / "model", config)),
            max_seq_length=max(args.tokens),
            dtype=torch.bfloat16,
            load_in_4bit=False,
        )
        fill(model, config, args.device)
        model = FastLanguageModel.get_peft_model(
            model,
            r=args.rank,
            lora_alpha=2 * args.rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        FastLanguageModel.for_training(model)
        self._model: Any = model
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        if state == "bfloat16":
            for parameter in self._trainable:
                parameter.data = parameter.data.to(torch.bfloat16)
        self._adamw = torch.optim.AdamW(self._trainable, lr=1e-5, weight_decay=0.0, fused=True)
        self._autocast = torch.autocast(args.device, torch.bfloat16, enabled=state == "float32")
        self._device = args.device
        self.facts = {
            "num_trainable": sum(p.numel() for p in self._trainable),
            "adapter_dtypes": sorted({str(p.dtype) for p in self._trainable}),
            "experts": _experts_backend(),
            "versions": {name: version(name) for name in ("unsloth", "unsloth_zoo", "transformers", "peft", "trl")},
            "note": NOTE + NOTES[state],
        }

    def step(self, token_ids: Any) -> float:
        """Forward, backward, update. Returns the loss before the update."""
        import torch

        ids = torch.from_numpy(token_ids).to(self._device)[None]
        with self._autocast:
            loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trainable, 1.0, foreach=True)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(loss.detach())


def _checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder that loads as the model, with one tensor of it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")).save(str(folder / "tokenizer.json"))
    norm = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    save_file({"model.norm.weight": norm}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _experts_backend() -> str:
    from unsloth_zoo import DEVICE_TYPE
    from unsloth_zoo.temporary_patches.moe_utils import select_moe_backend

    return f"unsloth on {DEVICE_TYPE}, {select_moe_backend()}"
