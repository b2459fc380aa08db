"""What a check before the start shows of rows as the model will get them: their tokens' text, taught ones marked.

    rows.jsonl:1, 9 tokens (2 taught): '<bos>user: 2 + 2?\\nassistant: >>>4<eos><<<'

Owns: how a row is shown, and what is said of answers without the thinking that a generation prompt begins.
"""

import itertools
from collections.abc import Sequence

from slipstream.conf.plural import counted
from slipstream.orchestrator.inputs.rows.conversations import Conversation, Lesson
from slipstream.orchestrator.inputs.rows.preferences import ANSWERS
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.rollout.types import Prompt

MAX_SHOWN = 600
"""Characters of one sequence; of a longer one, beginning and end."""


def shown_row(row: Prompt | Lesson, decoder: TextEncoder) -> str:
    if isinstance(row, Prompt):
        return f"{counted(len(row.token_ids), 'token')}: {_cut(decoder.decode(row.token_ids))}"
    if row.are_compared:
        return ", ".join(f"{name} {_shown(one, decoder)}" for name, one in zip(ANSWERS, row.sequences, strict=True))
    first, *others = row.sequences
    more = f" (and {len(others)} more sequences of this row)" if others else ""
    return _shown(first, decoder) + more


def thoughts_not_given(rows: Sequence[Lesson]) -> list[str]:
    """What to say of answers that lack what the model is given at their place (answers.py); [] if none do."""
    unseen = [next((one.unseen for one in row.sequences if one.unseen), "") for row in rows]
    found = [text for text in unseen if text]
    if not found:
        return []
    return [
        f"{len(found)} of the first {len(rows)} rows have answers without {found[0]!r}, which the chat template's "
        "generation prompt gives the model: they are taught where the template writes them, without it; write the "
        "thinking into the answers, or give model.tokenizer=FOLDER with a template that begins no thought"
    ]


def _shown(one: Conversation, decoder: TextEncoder) -> str:
    parts: list[str] = []
    for is_taught, run in itertools.groupby(zip(one.token_ids, one.is_taught, strict=True), key=lambda pair: pair[1]):
        text = decoder.decode([token for token, _ in run])
        parts.append(f">>>{text}<<<" if is_taught else text)
    return f"{len(one.token_ids)} tokens ({sum(one.is_taught)} taught): {_cut(''.join(parts))}"


def _cut(text: str) -> str:
    half = MAX_SHOWN // 2
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:half]} ... {text[-half:]}")
