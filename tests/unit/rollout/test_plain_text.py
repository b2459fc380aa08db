"""Locks: a text gets each special token that its tokenizer adds once, whether or not it was rendered before."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from slipstream.rollout.text.plain_text import TOKENIZER_FILE, encode_open, encode_text, load_tokenizer

FORMS = {"": "$A", "begin": "<b> $A", "both": "<b> <c> $A <e> <b>", "end": "$A <e>"}


def save(folder: Path, form: str, **settings: Any) -> Tokenizer:
    """A byte-level BPE that has " Paris" as one token, and adds special tokens as the form says."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(special_tokens=["<b>", "<c>", "<e>"], show_progress=False)
    tokenizer.train_from_iterator(["it is Paris", "is Paris"], trainer)
    if form:
        pairs = [(token, tokenizer.token_to_id(token)) for token in ("<b>", "<c>", "<e>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=pairs)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return tokenizer


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_text_gets_what_its_tokenizer_adds_and_a_rendered_one_nothing_twice(tmp_path: Path, form: str) -> None:
    tokenizer = save(tmp_path, form)
    theirs = tokenizer.encode("it is Paris").ids
    assert encode_text(tokenizer, "it is Paris", True)[0] == theirs
    rendered = "".join("it is Paris" if part == "$A" else part for part in (form or "$A").split())
    ids, places = encode_text(tokenizer, rendered, True)
    plain = tokenizer.encode(rendered, add_special_tokens=False)
    assert (ids, places) == (plain.ids, plain.offsets)
    assert ids == theirs
    assert encode_text(tokenizer, rendered, False)[0] == plain.ids


@pytest.mark.parametrize(("form", "begins"), [("", []), ("<b> $A", ["<b>"]), ("<b> $A <e>", ["<b>"]), ("$A <e>", [])])
def test_a_prompt_gets_no_end_of_sequence_but_its_own(tmp_path: Path, form: str, begins: list[str]) -> None:
    tokenizer = save(tmp_path, form)
    ends = {tokenizer.token_to_id("<e>")}
    plain = [*map(tokenizer.token_to_id, begins), *tokenizer.encode("it is Paris", add_special_tokens=False).ids]
    assert encode_open(tokenizer, "it is Paris", ends) == plain
    assert encode_open(tokenizer, "it is Paris<e>", ends) == [*plain, *ends]


def test_half_of_what_is_added_is_no_rendered_text(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, FORMS["both"])
    assert encode_text(tokenizer, "<b>it", True)[0] == tokenizer.encode("<b>it").ids


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_text_gets_all_that_is_added(tmp_path: Path, form: str) -> None:
    tokenizer = save(tmp_path, form)
    alone = tokenizer.encode("")
    assert encode_text(tokenizer, "", True) == (alone.ids, alone.offsets)
    assert len(alone.ids) == len(form.split()) - ("$A" in form)


def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, "")
    whole = tokenizer.encode("it is Paris it is Paris").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / TOKENIZER_FILE))
    assert encode_text(load_tokenizer(tmp_path), "it is Paris it is Paris", True)[0] == whole
