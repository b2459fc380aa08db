from bench.sizes import ROOT, sizes_of, untrue_entries
from slipstream.conf.options import flat_options


def test_the_lists_of_sizes_are_true_of_the_tree() -> None:
    assert not untrue_entries()


def test_sizes_counts_the_options_of_the_schema() -> None:
    assert sizes_of(ROOT)["options"] == len(flat_options())
