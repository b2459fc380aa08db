"""Where the tensors of a language model lie in a checkpoint that has a vision tower, or stacks its experts. No torch.

stored                                    found as
model.language_model.norm.weight          model.norm.weight
language_model.lm_head.weight             lm_head.weight
...mlp.experts.gate_up_proj  (E, 2I, H)   ...mlp.experts.3.gate_proj.weight (I, H): rows 0..I-1 of expert 3
                                          ...mlp.experts.3.up_proj.weight   (I, H): the rows below them
...mlp.experts.down_proj     (E, H, I)    ...mlp.experts.3.down_proj.weight (H, I)
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.disk.safetensors_files import DTYPES, StoredTensor
from slipstream.weight_sync.layout import DTYPE_BYTES

_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def language_model_tensors(stored: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Every tensor, under the name that it has in a checkpoint of the language model alone. Raises ConfigError if two
    would have one name.

    Args:
        wanted: Names of the model's tensors; experts among them are looked for in stacks, too.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = name_without_wrapper(name)
        if own in found:
            raise ConfigError(f"{tensor.path}: {name} is {own} of the language model, which {found[own].name} is, too")
        found[own] = tensor
    stacks: set[str] = set()
    for name in wanted:
        expert = _EXPERT.fullmatch(name)
        if expert is None or name in found:
            continue
        stack = f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj"
        if stack in found and (one := _one_expert(found[stack], int(expert[2]), expert[3])) is not None:
            found[name] = one
            stacks.add(stack)
    return {name: tensor for name, tensor in found.items() if name not in stacks}


def name_without_wrapper(stored: str) -> str:
    """In a checkpoint of the language model alone; as it is, if it is no tensor of that."""
    return next((own + stored[len(prefix) :] for prefix, own in _PREFIXES.items() if stored.startswith(prefix)), stored)


def _one_expert(stack: StoredTensor, expert: int, projection: str) -> StoredTensor | None:
    """None: the stack does not have it."""
    if len(stack.shape) != 3 or expert >= stack.shape[0] or stack.dtype not in DTYPES:
        return None
    rows, columns = stack.shape[1:]
    first, num_rows = (0, rows) if projection == "down" else (rows // 2 if projection == "up" else 0, rows // 2)
    skipped = (expert * rows + first) * columns * DTYPE_BYTES[DTYPES[stack.dtype]]
    return replace(stack, offset=stack.offset + skipped, shape=(num_rows, columns), inside=(expert, first))
