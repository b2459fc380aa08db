"""What conf/elsewhere.py says of other libraries' options is what docs/coming_from.md says, and the other way round."""

import re
from pathlib import Path

from slipstream.conf.elsewhere import EARLIER, ELSEWHERE, counterpart
from slipstream.conf.options import GROUPS, options_by_name, section_docs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming_from.md"
OURS = {*options_by_name(), *GROUPS}
SPAN = re.compile(r"(?<!no )`([^`]+)`")
NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


def rows_of_the_page() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Our words of each row -> the options of others in the row. A word in parentheses is a value."""
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if not line.startswith("|") or len(cells) != 5:
            continue
        ours, *others = (SPAN.findall(re.sub(r"\([^()]*\)", "", cell)) for cell in cells[1:])
        ours = tuple(word for word in ours if word.partition("=")[0] in OURS or word.startswith("slipstream "))
        names = (word.partition("=")[0] for cell in others for word in cell)
        theirs = tuple(dict.fromkeys(n for n in names if NAME.fullmatch(n) and n not in {*OURS, *section_docs()}))
        if ours and theirs:
            rows[ours] = (*rows.get(ours, ()), *theirs)
    return rows


def test_the_page_and_the_messages_have_one_table() -> None:
    assert len(ELSEWHERE) > 50
    rows = {" or ".join(ours): " ".join(theirs) for ours, theirs in rows_of_the_page().items()}
    assert rows == ELSEWHERE


def test_what_was_an_option_is_none_and_what_it_is_now_is_one() -> None:
    options = options_by_name()
    assert not [name for names in EARLIER.values() for name in names.split() if name in options]
    named = re.findall(r"\b[a-z_]+\.[a-z_.]+\b", " ".join(EARLIER))
    assert [name for name in named if name.removesuffix(".initializer_range") not in options] == ["bench.controls"]


def test_a_name_with_one_meaning_is_found_by_its_end() -> None:
    assert counterpart("kl_loss_coef") == "algorithm.kl_coef"
    assert counterpart("rollout.n") == "algorithm.group_size"
    assert counterpart("args.learning_rate") == "trainer.optim.lr"
    assert counterpart("type") is None, "of four options"
    assert counterpart("trainer.num_rank") is None
