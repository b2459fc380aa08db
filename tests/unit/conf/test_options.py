"""Types, docs, choices and near names as the help and the error messages show them."""

import json

from bench.make_letters import FOLDER, LETTERS, make_splits
from slipstream.conf.options import CONF_DIR, GROUPS, group_choices, nearest, options_by_name, section_docs, show
from slipstream.conf.plural import counted


def test_options_say_type_default_and_choices() -> None:
    options = options_by_name()
    assert options["trainer.ep_size"].type_label == "integer"
    assert options["run.resume"].type_label == "text or null"
    assert options["trainer.optim.betas"].type_label == "list of 2 numbers"
    assert options["weight_sync.transport"].choices == ("auto", "tcp", "nvlink", "rdma")
    assert show(options["weight_sync.transport"].default) == "auto"
    assert show(options["cluster.dashboard"].default) == "true"
    assert options["trainer.ep_size"].doc.startswith("Expert-parallel group size")


def test_every_group_folder_is_listed_and_every_choice_described() -> None:
    folders = {path.name for path in CONF_DIR.iterdir() if path.is_dir() and list(path.glob("*.yaml"))}
    assert folders == set(GROUPS)
    assert not [choice for group in GROUPS for choice in group_choices(group) if len(choice.doc) < 10]


def test_numbers_come_with_their_nouns() -> None:
    assert [counted(*one) for one in ((1, "rank"), (2, "rank"), (0, "process"))] == ["1 rank", "2 ranks", "0 processes"]


def test_nearest_finds_typing_mistakes_and_forgotten_sections() -> None:
    known = [*options_by_name(), *section_docs()]
    assert nearest("trainer.ep_sise", known)[0] == "trainer.ep_size"
    assert nearest("max_staleness", known)[0] == "algorithm.max_staleness_steps"
    assert nearest("group_size", known)[0] == "algorithm.group_size"
    assert nearest("qqqq", known) == nearest("run.seed", []) == []
    # A beginning is nearer than a part, and a part of three letters or more than nothing.
    assert nearest("run.num", ["run.num_steps_of_everything", "ran.nub"]) == ["run.num_steps_of_everything"]
    assert nearest("gpu", ["cluster.the_share_of_a_gpu"]) == ["cluster.the_share_of_a_gpu"]
    assert nearest("gp", ["cluster.the_share_of_a_gpu"]) == []
    # 5 of 8 letters are 0.625, 5 of 8 and 9 are 0.59: not similar, though hardly less than the best.
    assert nearest("abcdefgh", ["abcdewxyz", "abcdexyz"]) == ["abcdexyz"]
    assert nearest("a.seed", ["e.seed", "d.seed", "c.seed", "b.seed"]) == ["b.seed", "c.seed", "d.seed"]
    assert options_by_name()["trainer.optim.lr"].section == "trainer"


def test_letters_are_what_the_script_makes() -> None:
    for name, rows in make_splits().items():
        assert [json.loads(line) for line in (FOLDER / name).read_text(encoding="ascii").splitlines()] == rows


def test_letters_depend_on_the_prompt_and_splits_share_no_digits() -> None:
    splits = make_splits()
    digits = {name: set() for name in splits}
    for name, rows in splits.items():
        answers = [row["answer"] for row in rows]
        # 8 letters equally often: the best constant answer scores 1/8.
        assert {answers.count(letter) for letter in LETTERS} == {len(rows) // len(LETTERS)}
        for row in rows:
            assert len(row["prompt"]) <= 8
            assert [character for character in row["prompt"] if character.isalpha()] == [row["answer"]]
            digits[name].add("".join(character for character in row["prompt"] if character.isdigit()))
    assert not digits["letters_train.jsonl"] & digits["letters_heldout.jsonl"]
