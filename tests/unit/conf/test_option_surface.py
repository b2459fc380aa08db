"""The list of options is frozen: adding, renaming or removing one is a visible diff in docs/options.md."""

from pathlib import Path

from slipstream.conf.functions import import_function
from slipstream.conf.options import flat_options, section_docs


def test_every_option_and_section_is_documented() -> None:
    undocumented = [option.name for option in flat_options() if len(option.doc) < 10]
    assert not undocumented, "write a string under the field in conf/schema/"
    assert not [name for name, doc in section_docs().items() if not doc]


def test_names_of_options_that_have_a_unit_carry_it() -> None:
    """A name that ends in a quantity says in what: seconds, bytes, tokens or steps."""
    for option in flat_options():
        leaf = option.name.rsplit(".", 1)[-1]
        assert not leaf.endswith(("timeout", "interval", "size_mb", "_ms_", "duration")), option.name


def test_options_page_is_up_to_date() -> None:
    docs = Path(__file__).parents[3] / "docs"
    written = import_function("page", f"{docs / 'options_page.py'}:page")()
    assert (docs / "options.md").read_text(encoding="utf-8") == written, (
        "run: python docs/options_page.py > docs/options.md"
    )
