"""The prompts of a run follow its data options, and every row is checked where it is read."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import DataConfig, RunConfig
from slipstream.orchestrator.data.curriculum import Middling
from slipstream.orchestrator.data.streams import Mixed, Shuffled, Streamed
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.rows.prompt_rows import (
    RENDERED_ROWS,
    PromptRows,
    RowEncoder,
    check_data,
    check_ends,
)
from slipstream.rollout.errors import DataError


def write(path: Path, count: int, bad_row: int | None = None) -> str:
    """Rows "0a=", "1a=", ...; one of them may have no answer."""
    rows = [{"prompt": f"{number % 10}a=", "target": {"text": "a"}} for number in range(count)]
    if bad_row is not None:
        del rows[bad_row]["target"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(*words: str) -> PromptRows:
    """The quick start's prompts with these options."""
    config = load_run_config(
        ["experiment=quickstart", "data=files", "data.columns.answer=target.text", "data.max_prompt_tokens=8", *words]
    )
    return PromptRows(config, RowEncoder(config))


@pytest.mark.parametrize(
    ("words", "kind"), [([], Shuffled), (["data.stream=true"], Streamed), (["data.order=middling"], Middling)]
)
def test_options_choose_the_order(
    tmp_path: Path, words: list[str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataConfig, "stream_buffer_rows", 3)
    a, b = write(tmp_path / "a.jsonl", 7), write(tmp_path / "b.jsonl", 5)
    one = rows_of(f"data.path={a}", *words).stream()
    assert type(one) is kind
    assert {prompt.prompt_id for prompt in islice(one, 7)} == set(range(7))
    both = rows_of(f"data.sources=[{a},{b}]", "data.weights=[1,3]", *words).stream()
    assert type(both) is Mixed
    drawn = [next(both) for _ in range(200)]
    assert {prompt.prompt_id for prompt in drawn} == {2 * row for row in range(7)} | {2 * row + 1 for row in range(5)}
    assert all(prompt.fields["answer"] == "a" for prompt in drawn)


def test_a_row_beyond_the_first_buffer_is_checked_when_its_buffer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataConfig, "stream_buffer_rows", 3)
    path = write(tmp_path / "a.jsonl", 9, bad_row=7)
    rows = rows_of(f"data.path={path}", "data.stream=true", "reward=exact_match")
    assert len(rows.training()) == 3
    stream = rows.stream()
    list(islice(stream, 6))
    with pytest.raises(DataError, match=r"a\.jsonl:8: no column 'target\.text' \(data\.columns\.answer\)"):
        next(stream)
    with pytest.raises(DataError, match=r"a\.jsonl:8"):
        rows_of(f"data.path={path}", "reward=exact_match").stream()


def test_held_out_rows_come_from_any_source(tmp_path: Path) -> None:
    training, held_out = write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 4)
    rows = rows_of(f"data.path={training}", f"data.eval_path={held_out}", "data.stream=true")
    assert [prompt.prompt_id for prompt in rows.held_out()[""]] == [0, 1, 2, 3]
    assert rows_of(f"data.path={training}").held_out() == {}
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"b\.jsonl has no rows"):
        rows.held_out()


def test_a_column_that_nobody_can_be_given_is_named_and_refused_only_where_a_reward_reads_it(tmp_path: Path) -> None:
    columns = {"prompt": ["1a=", "2a="], "answer": ["a", "a"], "image": [b"\x89PNG", None]}
    pq.write_table(pa.table(columns), path := tmp_path / "a.parquet")
    words = ["experiment=quickstart", "data=files", "data.max_prompt_tokens=8", "algorithm.groups_per_step=1"]
    words += [f"data.path={path}", "reward=exact_match", "rollout.sampling.stop_at_eos=true"]
    fact = check_data(load_run_config(words))
    assert "columns that neither rewards nor agents get, because JSON cannot hold them: image (bytes)" in fact.finding
    assert fact.is_warning
    told = r"a\.parquet: row 0: column 'answer' \(reward\.kind=exact_match\) holds bytes; write it as text"
    with pytest.raises(DataError, match=told):
        rows_of(f"data.path={path}", "reward=exact_match", "data.columns.answer=image").training()


@pytest.mark.parametrize("stream", [[], ["data.stream=true"]])
def test_rows_that_are_too_long_are_left_out_where_that_is_asked_for(
    tmp_path: Path, stream: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataConfig, "stream_buffer_rows", 4)
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "1a=" * (1 + 3 * (number in (1, 4))), "target": {"text": "a"}} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl:2: the prompt has 13 tokens.*or set data\.drop_too_long=true"):
        rows_of(f"data.path={path}", *stream).stream()
    words = [f"data.path={path}", f"data.eval_path={path}", "data.drop_too_long=true", *stream]
    kept = rows_of(*words)
    assert {prompt.prompt_id for prompt in islice(kept.stream(), 4)} == {0, 2, 3, 5}
    assert [prompt.prompt_id for prompt in kept.held_out()[""]] == [0, 2, 3, 5]
    config = load_run_config(["experiment=quickstart", "data=files", "data.max_prompt_tokens=8", *words])
    finding = check_data(config).finding
    first = "the first 3 (1 too long and left out)" if stream else "4 (2 too long and left out)"
    told = f"{first} in {path}, held-out 4 (2 too long and left out) in {path}, which is trained on as well"
    few = "; fewer than a step takes, so that each is drawn more than once: algorithm.groups_per_step=16"
    assert finding == (told if stream else told + few)
    alone = replace(config, run=replace(config.run, num_steps=0))
    assert check_data(alone).finding == told.removesuffix(", which is trained on as well")
    with pytest.raises(DataError, match=r"a\.jsonl has no rows that are short enough"):
        rows_of("data.max_prompt_tokens=2", *words).stream()


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ([], r"set rollout\.sampling\.stop_token_ids=\[ID\] .* or rollout\.sampling\.stop_at_eos=false"),
        (["algorithm=sft"], r"give model\.tokenizer=FOLDER, whose tokenizer_config\.json names eos_token"),
        (["algorithm=dpo"], r"no answer would teach the model to end"),
    ],
)
def test_a_model_without_an_end_is_refused(words: list[str], cure: str) -> None:
    base = ["experiment=sft_quickstart"] if words else ["experiment=quickstart", "rollout.sampling.stop_at_eos=true"]
    config = load_run_config([*base, *words])
    with pytest.raises(ConfigError, match=f"no file of the model names a token that ends a response.*{cure}"):
        check_ends(config, {})
    check_ends(config, {2: "<eos>"})
    if words:
        sampling = replace(config.rollout.sampling, stop_token_ids=(5,))
        with pytest.raises(ConfigError, match=cure):  # nothing is sampled
            check_ends(replace(config, rollout=replace(config.rollout, sampling=sampling)), {})


@pytest.mark.parametrize("word", ["stop_at_eos=false", "stop_token_ids=[3]", 'stop=["</a>"]'])
def test_an_option_may_say_where_responses_end(word: str) -> None:
    words = ["experiment=quickstart", "rollout.sampling.stop_at_eos=true", f"rollout.sampling.{word}"]
    check_ends(load_run_config(words), {})


def test_the_ends_before_a_run_are_those_of_its_model_folder(tmp_path: Path) -> None:
    """model.tokenizer's beside those of model.path's configs, and of model.hf_config."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder in (model, tokenizer):
        folder.mkdir()
        save_character_tokenizer(folder, vocab_size=64)
    config = load_run_config(["experiment=quickstart"])
    (model / "config.json").write_text(json.dumps({**config.model.hf_config, "eos_token_id": 5}))
    (model / "generation_config.json").write_text('{"eos_token_id": [6]}')

    def ends(tokenizer: str, **hf_config: int) -> set[int]:
        options = replace(config.model, path=str(model), tokenizer=tokenizer, hf_config=hf_config)
        return set(RowEncoder(replace(config, model=options)).ends)

    assert ends(str(tokenizer)) == {2, 6, 5}
    assert ends(str(tokenizer), eos_token_id=7) == {2, 6, 7}
    assert ends("characters") == {2}, "the configs' ids are other characters here"


@pytest.mark.parametrize("reward", ["exact_match", "regex", "math"])
@pytest.mark.parametrize(
    ("answer", "got"),
    [
        *((None, "got null"), (True, "got true"), ([1], r"got \[1\]"), ({"a": 1}, r'got \{"a": 1\}')),
        (float("nan"), "got NaN"),
        ("\ud83d", "character 1 of the text .* half of a surrogate pair"),
    ],
)
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(tmp_path: Path, reward: str, answer, got: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1a=", "target": {"text": one}}) + "\n" for one in ("a", answer)))
    pattern = ['reward.pattern="(a)"'] if reward == "regex" else []
    rows = rows_of(f"data.path={path}", f"reward={reward}", *pattern)
    with pytest.raises(
        DataError, match=rf"a\.jsonl:2: column 'answer' \(reward\.kind={reward}\)( must be text or a number, |: ){got}"
    ):
        rows.training()


@pytest.mark.parametrize("tests", [None, "", [], [{"input": 4, "output": "8"}], {"inputs": ["1"]}])
def test_code_that_no_test_judges_is_refused(tmp_path: Path, tests: Any) -> None:
    path = tmp_path / "a.jsonl"
    rows = ({"prompt": "1a=", "target": {"text": "a"}, "tests": one} for one in ("assert True", tests))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl:2: column 'tests' \(reward\.kind=code\): .* forms of docs/rewards"):
        rows_of(f"data.path={path}", "reward=code").training()


def test_numbers_are_answers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = ["a", 4, 0.5, -(10**400)]
    path.write_text("".join(json.dumps({"prompt": "1a=", "target": {"text": one}}) + "\n" for one in answers))
    prompts = rows_of(f"data.path={path}", "reward=exact_match").training()
    assert [prompt.fields["answer"] for prompt in prompts] == answers


REFUSES = "{% if messages[0].content == 'no' %}{{ raise_exception('not so') }}{% endif %}"
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{{ effort }}{% endif %}"
)


def chats(folder: Path, template: str, rows: list[dict[str, Any]], *words: str) -> RunConfig:
    """A run of the quick start whose tokenizer has this template, on these rows."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    save_character_tokenizer(tokenizer, vocab_size=64)
    described = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template}))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=files", f"data.path={folder}/a.jsonl", f"model.tokenizer={tokenizer}"]
    first = "experiment=sft_quickstart" if "messages" in rows[0] else "experiment=quickstart"
    return load_run_config([first, *data, *words])


def says(text: str, answer: str = "") -> dict[str, Any]:
    asked = [{"role": "user", "content": text}]
    return {"messages": [*asked, {"role": "assistant", "content": answer}]} if answer else {"prompt": asked}


def test_the_first_rows_of_each_source_are_rendered_before_a_run(tmp_path: Path) -> None:
    template = REFUSES + THINKS
    config = chats(tmp_path / "one", template, [says("yes")] * (RENDERED_ROWS - 1) + [says("no")])
    with pytest.raises(DataError, match=rf"a\.jsonl:{RENDERED_ROWS}: .* chat template refuses the messages: not so"):
        check_data(config)
    config = chats(tmp_path / "two", template, [says("yes")] * RENDERED_ROWS + [says("no")])
    fact = check_data(config)
    assert fact.finding.endswith(f"a.jsonl; the chat template was tried on the first {RENDERED_ROWS} rows of each")
    assert not fact.is_warning
    (shown, *_) = fact.also
    assert shown.subject == "first prompt"
    assert shown.finding.endswith("a.jsonl:1, 27 tokens: '[user]yes[assistant]<think>'")
    resumed = check_data(replace(config, run=replace(config.run, resume=str(tmp_path / "old"))))
    assert "; whether they are those that the run began with is seen once the run has read them" in resumed.finding


def test_the_turns_of_every_row_are_checked(tmp_path: Path) -> None:
    """Also where a source has more rows than go through the template."""
    last = {"prompt": [*says("c")["prompt"], *says("d")["prompt"]]}
    rows = [{"prompt": [*says("b", "c")["messages"], *says("d")["prompt"]]}] + [says("a")] * RENDERED_ROWS + [last]
    with pytest.raises(DataError, match=rf"a\.jsonl:{len(rows)}: messages 1 and 2 are both of 'user'"):
        check_data(chats(tmp_path, THINKS, rows))


def test_an_agent_may_have_any_turns_in_its_rows(tmp_path: Path) -> None:
    rows = [{"prompt": [*says("a")["prompt"], *says("a")["prompt"]]}]
    agent = "rollout.agent=slipstream.rollout.agents.games.letters:play"
    assert not check_data(chats(tmp_path, THINKS, rows, agent, "algorithm.groups_per_step=1")).is_warning


def test_rows_that_are_held_out_are_rendered_too(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps(says("no")))
    config = chats(tmp_path, REFUSES + THINKS, [says("yes")], f"data.eval_path={tmp_path}/b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl:1: .* chat template refuses the messages: not so"):
        check_data(config)


def test_what_a_row_teaches_is_shown_and_answers_without_a_thought_are_told(tmp_path: Path) -> None:
    """The model is given [assistant]<think>, and the answers begin behind [assistant]."""
    fact = check_data(chats(tmp_path, THINKS, [says("a", "b"), says("c", "<think>hm</think>d")]))
    assert "1 of the first 2 rows have answers without '<think>'" in fact.finding
    assert fact.is_warning
    (shown, *_) = fact.also
    assert shown.subject == "first conversation"
    assert shown.finding.endswith("a.jsonl:1, 20 tokens (2 taught): '[user]a[assistant]>>>b<eos><<<'")


def test_options_of_the_template_are_checked_and_used_before_a_run(tmp_path: Path) -> None:
    config = chats(tmp_path / "one", THINKS, [says("yes")], "data.chat_template_kwargs.effort=low")
    (shown, *_) = check_data(config).also
    assert shown.finding.endswith("'[user]yes[assistant]<think>low'")
    config = chats(tmp_path / "two", THINKS, [says("yes")], "data.chat_template_kwargs.effort_level=low")
    with pytest.raises(
        DataError, match=r"^data\.chat_template_kwargs\.effort_level: .* no such option; it reads effort"
    ):
        check_data(config)
    config = chats(tmp_path / "none", "", [{"prompt": "yes"}], "data.chat_template_kwargs.effort=low")
    with pytest.raises(DataError, match=r"^data\.chat_template_kwargs has no effect with a tokenizer that has no chat"):
        check_data(config)
