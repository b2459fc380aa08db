from bench.sizes import ROOT, missing_entries, sizes_of
from conf.options import flat_options


def test_the_lists_of_sizes_name_what_is_there() -> None:
    assert not missing_entries()


def test_sizes_counts_the_options_of_the_schema() -> None:
    assert sizes_of(ROOT)["options"] == len(flat_options())
