"""Every mistake that a user can make on the command line or in a file: one clear message on stderr, exit code 2, no
traceback, and nothing started: no run folder, no Ray, no engine.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.conf.load import load_run_config
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.start_commands import AT_ONCE
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer

Refuse = Callable[..., str]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("trainer.num_rank=2", ["unknown option trainer.num_rank. Did you mean trainer.num_ranks?"]),
        ("cluster.device=gpu", ["error: cluster.device must be one of auto, cpu, cuda, got 'gpu'\n"]),
        ("model=checkpoint model.path=/absent trainer.ep_size=1", ["model.path=/absent: no such folder"]),
        ("weight_sync.watermark_bytes=1.5GiB", ["got '1.5GiB'. Write bytes: weight_sync.watermark_bytes=1610612736"]),
        ("weight_sync.watermark_bytes=2GB", ["Write bytes: weight_sync.watermark_bytes=2000000000"]),
        ("weight_sync.delta_bytes=1e6", ["must be an integer, got '1000000.0'. Write weight_sync.delta_bytes=1000000"]),
        ("weight_sync.delta=1000", ["unknown option weight_sync.delta. Did you mean weight_sync.delta_bytes?"]),
        ("model.hf_config.model_type=gpt2", ["qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe", "'gpt2'"]),
        (
            "model.hf_config.norm_topk_probs=true",
            ["norm_topk_probs is a field that this model does not have. Did you mean norm_topk_prob?"],
        ),
        ("model.hf_config.logit_scale=2", ["logit_scale is a field that nobody reads; remove it"]),
        ("data.path=absent.jsonl", ["absent.jsonl", "data.path"]),
        (  # the tests run with HF_HUB_OFFLINE=1
            "data=files data.path=hf:nobody/has-this:main:train",
            ["hf:nobody/has-this:main:train: HF_HUB_OFFLINE is set, and the dataset is not in the cache"],
        ),
        ("reward=regex reward.pattern='([a-z'", ["reward.pattern"]),
        ("reward.kind=no_such_package.rewards:score", ["reward.kind=no_such_package.rewards:score"]),
        ("reward.kind=json:no_such_function", ["reward.kind=json:no_such_function"]),
        ("run.resume=runs/latest", ["run.resume=runs/latest: no such folder"]),
        (f"run.dir={'r' * 256}", ["rr/latest cannot be reached: File name too long; name a path"]),
        (f"data=files data.path={'d' * 256}.jsonl", ["dd.jsonl/state.json cannot be reached: File name too long"]),
        ("cluster.ray_address=127.0.0.1:9", ["cluster.ray_address=127.0.0.1:9", "cluster=local"]),
    ],
)
def test_options_that_cannot_be(refuse: Refuse, words: str, messages: list[str]) -> None:
    said = refuse(*words.split())
    assert all(message in said for message in messages), said


GOOD = '{"prompt": "1a=", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("files", "words", "messages"),
    [
        ({"m/tokenizer.json": "{}"}, "model.tokenizer=m", ["m/tokenizer.json is not a tokenizer (Model missing"]),
        ({"p.jsonl": GOOD + GOOD + GOOD[:-3]}, "data.path=p.jsonl", ["p.jsonl:3"]),
        (
            {"p.jsonl": GOOD + '{"prompt": "1b=", "solution": "b"}\n'},
            "data.path=p.jsonl reward=exact_match",
            ["p.jsonl:2: no column 'answer' for reward.kind=exact_match", "solution", "data.columns.answer=COLUMN\n"],
        ),
        (
            {"p.jsonl": '{"prompt": "1b="}\n'},
            "data.path=p.jsonl reward=exact_match algorithm=distill algorithm.teacher.base_url=http://127.0.0.1:9/v1 "
            "algorithm.teacher.model=t run.num_steps=0",
            ["the row has no others; add it, or set reward.kind=FILE.py:function, or reward=none"],
        ),
        (
            {"p.jsonl": '{"prompt": "1a=", "target": {"value": "a"}}\n'},
            "data.path=p.jsonl data.columns.answer=target.text",
            ["p.jsonl:1: no column 'target.text' (data.columns.answer)", "prompt, target.value"],
        ),
        ({"p.parquet": "PAR1 and no more"}, "data.path=p.parquet", ["p.parquet is not a readable Parquet file"]),
        ({"p.jsonl/a": ""}, "data.path=p.jsonl", ["p.jsonl is a folder"]),
        ({}, "data.path=/dev/null", ["data.path=/dev/null is no file that can be read more than once"]),
        ({"p.jsonl": GOOD.replace("1a", "1" * 40)}, "data.path=p.jsonl", ["p.jsonl:1", "data.max_prompt_tokens"]),
        (
            {"p.jsonl": GOOD + '{"prompt": "1Zb=", "answer": "b"}\n'},
            "data.path=p.jsonl",
            ["p.jsonl:2: characters ('Z') without a token in model.tokenizer=characters", "hf_config.vocab_size=101"],
        ),
        ({"old/any": ""}, "run.resume=old", ["run.resume=old holds no complete checkpoint"]),
        ({"file": ""}, "run.dir=file/runs", ["which is a file"]),
        (
            {"experiment/mine.yaml": "# @package _global_\nrun: {seed: 1}\n".encode("utf-16")},
            "--config-dir . experiment=mine",
            ["experiment/mine.yaml is not UTF-8 text; save the file as UTF-8"],
        ),
        (
            {"experiment/mine.yaml": "# @package _global_\nrun:\n  seed: 1\n  seed: 2\n"},
            "--config-dir . experiment=mine",
            ["experiment/mine.yaml, line 4: found duplicate key seed"],
        ),
    ],
)
def test_files_that_cannot_be(
    refuse: Refuse, tmp_path: Path, files: dict[str, str | bytes], words: str, messages: list[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refuse(*words.split())
    assert all(message in said for message in messages), said


def test_the_name_of_a_model_of_the_hub_gets_the_command_that_fetches_it(
    refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "no such folder; of the hub's, it is downloaded first: hf download Qwen/Qwen3-0.6B --local-dir "
        "models/Qwen3-0.6B; then give models/Qwen3-0.6B"
    )
    assert refuse("model=checkpoint", "model.path=Qwen/Qwen3-0.6B") == f"error: model.path=Qwen/Qwen3-0.6B: {said}\n"
    assert f"model.tokenizer=Qwen/Qwen3-0.6B: {said}" in refuse("model.tokenizer=Qwen/Qwen3-0.6B")
    plan = ["plan", "experiment=quickstart", "model=checkpoint", "model.path=Qwen/Qwen3-0.6B"]
    others = ([*words, "Qwen/Qwen3-0.6B"] for words in (["record"], ["parity"], ["eval"], ["push", "--start", "1"]))
    for command in (plan, *others):
        assert main(command) == 2
        assert said.partition("; ")[2] in capsys.readouterr().err
    adapter = refuse("trainer.lora.init_from=me/mine")
    assert "trainer.lora.init_from=me/mine: no such folder; of the hub's" in adapter
    (tmp_path / "models").mkdir()
    assert "give a Hugging Face model folder" in refuse("model=checkpoint", "model.path=models/Qwen3")
    assert "Did you mean model=checkpoint model.path=Qwen/Qwen3-0.6B?" in refuse("model=Qwen/Qwen3-0.6B")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.path=model.gguf is a file; give the folder" in refuse("model=checkpoint", "model.path=model.gguf")


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("learning_rate=1e-6", "trainer.optim.lr"),
        ("+actor_rollout_ref.rollout.n=8", "algorithm.group_size"),
        ("--num-generations=8", "algorithm.group_size"),
        ("--learning_rate", "trainer.optim.lr"),
    ],
)
def test_another_librarys_option_is_answered_with_ours(refuse: Refuse, word: str, ours: str) -> None:
    assert f"Here its counterpart is {ours} (docs/coming_from.md)" in refuse(word)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_option_that_a_model_on_disk_does_not_read(
    refuse: Refuse, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_run_config(["experiment=quickstart_adapter"]).model.hf_config
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = ["model=checkpoint", "model.init=random", "model.path=model", "model.tokenizer=characters"]
    words += ["trainer.ep_size=1", "trainer.lora.expert_rank=8"]
    if command == "train":
        message = refuse(*words)
    else:
        assert main(["plan", "experiment=quickstart", *words]) == 2
        message = capsys.readouterr().err
    assert "trainer.lora.expert_rank has no effect with model_type=qwen3, which has no experts; remove it" in message


GRADER = ["reward=judge", "reward.judge.base_url=http://localhost/v1", "reward.judge.model=m"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.parts.a.kind=code"], "prompts.jsonl:1: no column 'tests' for reward.parts.a.kind=code"),
        (
            ["reward.parts.a.kind=regex", "reward.parts.b.kind=regex", "data.columns.reward=judges"],
            "prompts.jsonl:1: column 'reward' is 'c', which must name one of reward.parts (a, b)",
        ),
        (["reward=judge"], "reward.judge.base_url must be the address of an OpenAI endpoint"),
        ([*GRADER, "reward.judge.api_key_env=NO_SUCH_KEY"], "api_key_env names NO_SUCH_KEY, which is not set where"),
        ([*GRADER, "reward.judge.prompt_file=absent.txt"], "reward.judge.prompt_file=absent.txt cannot be read"),
        ([*GRADER, "reward.judge.prompt_file=grade.txt"], "prompts.jsonl:1: no column 'rubric' for reward.kind=judge"),
        (["reward.overlong_tokens=500"], "reward.overlong_tokens=500 exceeds the 4 tokens of the longest response"),
    ],
)
def test_rewards_that_cannot_judge(refuse: Refuse, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1a=", "answer": "a", "judges": "c"}\n')
    (tmp_path / "grade.txt").write_text("{{response}} by {{rubric}}")
    assert message in refuse("data.path=prompts.jsonl", *words)


def test_a_bad_row_of_any_source_is_named(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1a=", "answer": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "1b=", "answer": "b"}\n{"prompt": ""}\n')
    for more in ((), ("data.stream=true",), ("data.weights=[1,3]",)):
        assert "b.jsonl:2: the prompt is empty" in refuse("data=files", "data.sources=[a.jsonl,b.jsonl]", *more)
    is_missing = f"absent.jsonl does not exist in {Path.cwd()}; give a .jsonl"
    assert f"data.sources={is_missing}" in refuse("data=files", "data.sources=[a.jsonl,absent.jsonl]")
    for option in ("data.path", "data.eval_path", "data.eval_sets.sums"):
        assert f"{option}={is_missing}" in refuse("data=files", "data.path=a.jsonl", f"{option}=absent.jsonl")


def test_chat_prompts_need_a_chat_template(refuse: Refuse, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1a="}], "answer": "a"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    save_character_tokenizer(tmp_path, vocab_size=64)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    message = refuse("data.path=prompts.jsonl", "model.tokenizer=.")
    assert "prompts.jsonl:1: rows are lists of chat messages, and the tokenizer has no chat template" in message
    assert "model.tokenizer=FOLDER" in message


def test_tokenizer_of_another_model(refuse: Refuse, tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, vocab_size=90)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Z", "answer": "a"}) + "\n")
    message = refuse(f"model.tokenizer={tmp_path}", "data.path=prompts.jsonl")
    assert "prompts.jsonl:1: the tokenizer makes token" in message
    assert "vocab_size=64" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no adapter in PEFT's format (no adapter_config.json is there); give a folder such as"),
        ("{", "holds no adapter in PEFT's format"),
        ('{"r": 16, "lora_alpha": 32, "use_dora": true}', "has use_dora=true, with which it computes something else"),
    ],
)
def test_adapter_to_start_from_that_does_not_fit(
    refuse: Refuse, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    assert message in refuse(f"trainer.lora.init_from={tmp_path}")


def test_several_problems_are_all_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data.path=absent.jsonl", "reward.kind=no_such_package:score", "run.resume=absent"]
    assert main(["train", "experiment=quickstart", "cluster.dashboard=false", *words]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[0] == "error: 3 problems:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean train?"),
        (["version"], "unknown command 'version'. Did you mean --version?"),
        (["logs", "runs/latest"], "unknown command 'logs'. A run's log is RUN/run.log"),
        (["experiment=quickstart"], "Options follow a command: slipstream train experiment=quickstart"),
        (["train", "--dryrun"], "unknown flag --dryrun. Did you mean --dry-run?"),
        (["train", "--num-ranks=2"], "written section.option=value, without dashes. Did you mean trainer.num_ranks?"),
        (["train", "--", "trainer.num_rank=2"], "unknown option trainer.num_rank"),
        (["train", "--cfg", "all"], "--cfg"),
        (["train"], "model.path is required"),
        (["doctor", "--yaml"], "unknown flag --yaml. See: slipstream doctor --help"),
        (["parity", "model=tiny_qwen3_moe", "--prompts", "0"], "--prompts must be >= 1, got 0"),
        (["parity", "model=tiny_qwen3_moe", "--prompts", "2"], "--layer-prompts must be <= --prompts, got 4 and 2"),
        (["parity", "/no/such/folder"], "model.path=/no/such/folder: no such folder"),
        (["parity", "model=tiny_qwen3_moe", "trainer.numeric.match=x"], "Did you mean trainer.numerics.match?"),
        (["parity", "model=tiny_qwen3_moe", "--usual", "/no/such"], "--usual=/no/such cannot be read: No such file"),
        (["parity", "model=tiny_qwen3_moe", "--max-tokens", "9999"], "max_position_embeddings=512"),
    ],
)
def test_mistakes_before_any_option(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err.removeprefix(f"{AT_ONCE}\n")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_working_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["train", "experiment=quickstart", "--dry-run"]) == 2
    assert capsys.readouterr().err == "error: the working folder has been removed; cd into one that is there\n"


@pytest.mark.parametrize(
    "words", [["view", "no-run", "--export", "no/page.html"], ["record", "no-model", "--out", "no/layouts"]]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{words[-1]} cannot be written ({tmp_path / 'no'}: No such file or directory); give a file in a" in said
