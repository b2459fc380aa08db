"""A tokenizer for the chat template of a published model: its special tokens, and a small byte-level BPE."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parents[1] / "cases" / "chat_templates"
NUM_WORDS = 600
"""How many the vocabulary has without the added tokens, which come after them."""
QWEN = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
QWEN_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def save_template_tokenizer(folder: Path, name: str, specials: Sequence[str], plain: Sequence[str] = ()) -> None:
    """Write the tokenizer's files. The BPE is learned from the template.

    Args:
        name: Of a file in tests/cases/chat_templates.
        specials: Special tokens; the first ends a turn.
        plain: Further added tokens, which are not special.
    """
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer: Any = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [template], trainers.BpeTrainer(vocab_size=NUM_WORDS, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin = next((text for text in specials if "begin_of" in text or "begin▁of" in text), None)
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "bos_token": begin,
        "eos_token": specials[0], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(description))
