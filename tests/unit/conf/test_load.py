"""What `load_run_config` accepts, and what it says about everything else."""

import subprocess
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from slipstream.conf import load
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config, resolved_yaml
from slipstream.conf.options import CONF_DIR, group_choices
from slipstream.conf.schema import Device, RunConfig, TrainMode, TransportKind

QUICKSTART = "experiment=quickstart"
EXPERIMENTS = "".join(file.read_text() for file in (CONF_DIR / "experiment").glob("*.yaml"))


def refusal_of(*overrides: str, config_dir: Path | None = None) -> str:
    """The message with which the overrides, on top of the quick start, are refused."""
    with pytest.raises(ConfigError) as caught:
        load_run_config([QUICKSTART, *overrides], config_dir)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "hydra.cc" not in message
    return message


@pytest.mark.parametrize("name", [choice.name for choice in group_choices("experiment")])
def test_every_experiment_composes(name: str) -> None:
    assert load_run_config([f"experiment={name}"]).run.name == name


@pytest.mark.parametrize("name", ["quickstart", "sft_quickstart", "agent_game", "kimi_k2_thinking_lora"])
def test_a_config_survives_the_round_trip(name: str) -> None:
    """With and without engines, adapters, agents, a quantized model."""
    config = load_run_config([f"experiment={name}"])
    assert load_resolved_yaml(resolved_yaml(config)) == config


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (group, choice.name)
        for group in ("model", "trainer", "rollout", "weight_sync", "algorithm", "data", "reward", "cluster")
        for choice in group_choices(group)
        if f"/{group}: {choice.name}\n" not in EXPERIMENTS
    ],
)
def test_every_choice_that_no_experiment_makes_composes(group: str, choice: str) -> None:
    base = ["model=tiny_qwen3_moe", "data=letters", "rollout=small"]
    needed = {"checkpoint": ["model.path=/a/folder"], "files": ["data.path=a.jsonl"], "verl": ["data.path=a.parquet"]}
    needed |= {"judge": ["reward.judge.base_url=http://localhost/v1", "reward.judge.model=grader"]}
    teacher = ["algorithm.teacher.base_url=http://localhost/v1", "algorithm.teacher.model=big"]
    needed |= {"distill": teacher, "none": ["algorithm=distill", *teacher]}
    needed |= {"standard": ["model=qwen3_30b_a3b_4layers"]}  # whose longest sequence is more than the tiny models take
    int4_engines = ["weight_sync.mode=adapter", "cluster.device=cuda", "trainer.lora.targets=[mlp,experts]"]
    needed |= {"kimi_k2_thinking": int4_engines, "kimi_k2_5": int4_engines}
    config = load_run_config([*base, *needed.get(choice, []), f"{group}={choice}"])
    assert isinstance(config, RunConfig)


def test_overrides_reach_the_typed_config() -> None:
    words = ["run.seed=1", "run.seed=7", "trainer=full", "trainer.optim.betas=[0.8,0.9]", "weight_sync.transport=tcp"]
    config = load_run_config([QUICKSTART, *words, "model.hf_config.rope_theta=5000.0"])
    assert (config.run.seed, config.trainer.mode, config.trainer.optim.betas) == (7, TrainMode.full, (0.8, 0.9))
    assert config.weight_sync.transport is TransportKind.tcp and config.cluster.device is Device.cpu
    assert config.model.hf_config["rope_theta"] == 5000.0
    with pytest.raises(FrozenInstanceError):
        config.run.seed = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_choosing_another_model_leaves_nothing_of_the_first_one() -> None:
    hf_config = load_run_config([QUICKSTART, "model=tiny_qwen3", "trainer.ep_size=1"]).model.hf_config
    assert hf_config["model_type"] == "qwen3"
    assert "num_experts" not in hf_config


@pytest.mark.parametrize(
    "words",
    [
        ["run.seed=3"],
        ["run.seed=1", "experiment=sft_quickstart", "run.seed=2"],
        ["algorithm=dapo", "+model.hf_config.added=3", "model.hf_config.vocab_size=500", "run.name='a b'"],
        ["model.hf_config={a: {b: 1}}", "run.dir=${run.name}/here", "parity=standard"],
        ["data.sources=[a.jsonl,b.jsonl]", "data.weights=[1,2]", "data.path=null"],
    ],
)
def test_presets_that_are_kept_give_what_hydra_composes_at_once(words: list[str]) -> None:
    """The last time too, when a run before has set options of the same presets."""
    parsed = [load._read_override(word, None) for word in ["experiment=quickstart", *words]]
    at_once = OmegaConf.to_yaml(load._compose([load._for_hydra(override) for override in parsed]))
    for _ in range(2):
        assert OmegaConf.to_yaml(load._composed_of_presets(parsed)) == at_once


@pytest.mark.parametrize("word", ["+run.seed=3", "++run.seed=3", "run.seed=3"])
def test_known_options_may_be_set_with_or_without_plus(word: str) -> None:
    assert load_run_config([QUICKSTART, word]).run.seed == 3


def test_keys_of_the_hf_config_may_be_added_and_removed() -> None:
    words = ["model.hf_config.rope_scaling=null", "+model.hf_config.mlp_only_layers=[]", "~model.hf_config.rope_theta"]
    hf_config = load_run_config([QUICKSTART, *words]).model.hf_config
    assert hf_config["rope_scaling"] is None
    assert hf_config["mlp_only_layers"] == []
    assert "rope_theta" not in hf_config


def test_interpolation_works() -> None:
    config = load_run_config([QUICKSTART, "algorithm.group_size=${algorithm.groups_per_step}"])
    assert config.algorithm.group_size == config.algorithm.groups_per_step


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("trainer.num_rank=2", ["unknown option trainer.num_rank", "Did you mean trainer.num_ranks?"]),
        ("num_ranks=2", ["unknown option num_ranks", "trainer.num_ranks"]),
        ("rollout.sampling.top_p=0.9", ["there is no option rollout.sampling.top_p; training refuses it, because"]),
        ("algorithm.tis_max=2", ["there is no option algorithm.tis_max any more; it is algorithm.correction now"]),
        ("trainer.lr=1e-3", ["unknown option trainer.lr", "trainer.optim.lr"]),
        ("+zzz=1", ["unknown option zzz", "--help options"]),
        ("~zzz", ["unknown option zzz"]),
        ("hydra.run.dir=x", ["unknown option hydra.run.dir"]),
        ("trainer.num_ranks=two", ["trainer.num_ranks must be an integer", "'two'"]),
        ("trainer.num_ranks=[1,2]", ["trainer.num_ranks must be an integer, got '[1, 2]'"]),
        ("run.num_steps=1.5", ["run.num_steps must be an integer", "'1.5'"]),
        ("run.seed=", ["run.seed must be an integer", "nothing after the '='"]),
        ("trainer.optim.lr=fast", ["trainer.optim.lr must be a number", "'fast'"]),
        ("cluster.dashboard=maybe", ["cluster.dashboard must be true or false", "'maybe'"]),
        ("trainer.lora.rank=null", ["trainer.lora.rank must be an integer", "'null'"]),
        ("model.hf_config=3", ["model.hf_config must be a mapping"]),
        ("weight_sync.transport=nvlnk", ["must be one of auto, tcp, nvlink, rdma", "'nvlnk'", "Did you mean nvlink?"]),
        ("trainer.optim.betas=[0.9]", ["trainer.optim.betas must be two numbers", "[0.9]"]),
        ("experiment=quikstart", ["experiment has no such choice", "Did you mean quickstart", "qwen3_moe_2gpu"]),
        ("experiment=null", ["experiment=null: experiment has no such choice", "quickstart"]),
        ("data=null", ["data=null: data has no such choice", "letters"]),
        ("weight_sync=off", ["weight_sync has no such choice", "drained, standard"]),
        ("algorithm=PPO", ["algorithm has no such choice. algorithm=grpo is the nearest: there is no critic"]),
        ("algorithm=GRPO", ["algorithm has no such choice. Did you mean grpo"]),
        ("data.path=[a.jsonl,b.jsonl]", ["data.path must be text", "Several are data.sources=[a.jsonl,b.jsonl]"]),
        ("data=rows.jsonl", ["data has no such choice", "Did you mean data=files data.path=rows.jsonl?"]),
        ("reward=rw.py:f", ["reward has no such choice", "Did you mean reward.kind=rw.py:f?"]),
        ("reward=my.rewards:f", ["reward has no such choice", "Did you mean reward.kind=my.rewards:f?"]),
        ("reward=rw.py", ["reward has no such choice", "Did you mean reward.kind=rw.py:FUNCTION?"]),
        ("reward.kind=rw.py", ["reward.kind must be exact_match", "FILE.py:function", "got 'rw.py'"]),
        ("trainer={num_ranks: 2}", ["trainer is a section", "trainer.num_ranks=1"]),
        ('trainer.optim={"lr": 0.001}', ["trainer.optim is a section", "trainer.optim.lr="]),
        ("trainer.lora=8", ["trainer.lora is a section", "trainer.lora.rank=16"]),
        ("run.seed", ["'run.seed' is not NAME=VALUE; write run.seed=VALUE"]),
        ("seed", ["'seed' is not NAME=VALUE", "run.seed"]),
        ("quickstart", ["'quickstart' is not NAME=VALUE; write experiment=quickstart"]),
        ("--num-steps=3", ["unknown flag --num-steps=3", "without dashes", "run.num_steps"]),
        ("--weight-sync.keep-kv=true", ["there is no option weight_sync.keep_kv any more", "weight_sync.pause_mode"]),
        ("data.path=~/a.jsonl", ["cannot read 'data.path=~/a.jsonl'", "write data.path=$HOME/a.jsonl"]),
        ("rollout.sampling.stop=[</a>]", ["quote it twice, as in 'rollout.sampling.stop=[\"...\"]'"]),
        ("run.name=a{b", ["cannot read 'run.name=a{b'", "quote it twice"]),
        ("run.seed=1,2", ["one value per option"]),
        ("trainer.optim.betas=0.9,0.99", ["a list is written in brackets: 'trainer.optim.betas=[0.9,0.99]'"]),
        ("trainer.optim.lr=inf", ["trainer.optim.lr must be finite, got inf"]),
        ("~run.seed", ["cannot be removed", "run.seed=0"]),
        ("run.seed=${no.such}", ["run.seed", "no.such"]),
        ("run.name=a/b", ["run.name must be a file name"]),
        (f"run.name={'ü' * 101}", ["run.name must be a file name of at most 200 bytes"]),
    ],
)
def test_mistakes_in_one_word_are_named(word: str, parts: list[str]) -> None:
    message = refusal_of(word)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert ("data.sources=" in message) == word.startswith("data.path=["), "a cure of another mistake"


LOOP = (
    'for lr in 0.001 0.0001; do slipstream train experiment=quickstart trainer.optim.lr="$lr" run.name="lr-$lr"; done'
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["experiment=quickstart", "trainer.optim.lr=1e-3,1e-4"], LOOP),
        (["-m", "experiment=quickstart", "trainer.optim.lr=1e-3,1e-4"], LOOP),
        (["--multirun", "experiment=quickstart", "hydra/launcher=joblib", "trainer.optim.lr=1e-3,1e-4"], LOOP),
        (
            ["run.name=try", "run.seed=range(0,2)", "algorithm=grpo,dapo"],
            'for seed in 0 1; do for algorithm in grpo dapo; do slipstream train run.seed="$seed" '
            'algorithm="$algorithm" run.name="try-seed-$seed-algorithm-$algorithm"; done; done',
        ),
        (
            ["data.path=a,b", "+model.path=c,d", "run.name=try", "data.stop-x=1"],
            'for path in a b; do for model_path in c d; do slipstream train data.path="$path" '
            '+model.path="$model_path" data.stop-x=1 run.name="try-path-$path-model_path-$model_path"; done; done',
        ),
        (["model.path=/a/one,/a/two"], 'for path in /a/one /a/two; do slipstream train model.path="$path"; done'),
        (["-m", "experiment=quickstart"], "-m: a command starts one run, and none of its options has several values"),
        (["hydra/launcher=joblib"], "hydra/launcher=joblib: a command starts one run"),
    ],
)
def test_several_runs_are_answered_with_the_loop_that_makes_them(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_loop_runs_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "slipstream").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    (tmp_path / "slipstream").chmod(0o755)
    message = refusal_of("run.seed=1,2", "data.path='my rows.jsonl'")
    loop = message[message.index("for seed") : message.index(" (a text with")]
    done = subprocess.run(
        ["sh", "-c", loop], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"train|{QUICKSTART}|run.seed={seed}|data.path='my rows.jsonl'|run.name=seed-{seed}|" for seed in (1, 2)
    ]


def test_no_options_at_all_says_where_to_begin() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is required.*model=tiny_qwen3_moe"):
        load_run_config([])


def write_preset(folder: Path, text: str) -> Path:
    """A user's own experiment called `mine`."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\n# Mine.\n" + text, encoding="utf-8")
    return folder


def test_own_config_folder_adds_experiments(tmp_path: Path) -> None:
    absent = refusal_of("experiment=mine", config_dir=tmp_path / "absent")
    assert absent.startswith(f"--config-dir {tmp_path / 'absent'}: no such folder")
    write_preset(tmp_path, "defaults: [quickstart, _self_]\nrun: {name: mine, seed: 5}\n")
    too_deep = tmp_path / "experiment"
    said = f"and --config-dir {too_deep} has no experiment/mine.yaml"
    assert said in refusal_of("experiment=mine", config_dir=too_deep)
    assert "write experiment=mine" in refusal_of("mine", config_dir=tmp_path)
    config = load_run_config(["experiment=mine"], tmp_path)
    assert (config.run.name, config.run.seed, config.trainer.num_ranks) == ("mine", 5, 2)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer: {num_rank: 2}\n", ["experiment/mine.yaml", "unknown option trainer.num_rank", "trainer.num_ranks"]),
        ("trainer: {num_ranks: two}\n", ["experiment/mine.yaml", "trainer.num_ranks must be an integer", "two"]),
        ("trainer: {num_ranks: 2\n", ["not valid YAML", "mine.yaml", "line"]),
        ("defaults: [override /model: tiny_qwen]\n", ["model: tiny_qwen", "Did you mean tiny_qwen3", "Choices:"]),
        ("defaults: [quickstar]\n", ["experiment/mine.yaml: chooses", "Did you mean quickstart ", "Choices:"]),
        ("defaults: [mine]\n", ["the `defaults` of a preset lead back to itself", "--config-dir"]),
        ("trainer:\n", ["experiment/mine.yaml: trainer is a section; set its options"]),
        ("trainer: {optim: 3}\n", ["experiment/mine.yaml: the value 3 stands in the place of a section"]),
    ],
)
def test_mistakes_in_a_yaml_file_name_the_file_and_the_option(tmp_path: Path, text: str, parts: list[str]) -> None:
    write_preset(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(["experiment=mine"], tmp_path)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["trainer: {num_ranks: 2}\n", "defaults: [override /model: checkpoint]\n"])
def test_a_preset_for_the_whole_run_must_say_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    said = r"experiment/mine.yaml: its first line must be '# @package _global_', behind no byte order mark"
    with pytest.raises(ConfigError, match=said):
        load_run_config(["experiment=mine"], tmp_path)


def test_resolved_yaml_of_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^RUN/config\.yaml: not valid YAML at line 1: "):
        load_resolved_yaml("trainer: {num_rank", subject="RUN/config.yaml: ")
    of_another = r"^F: unknown option trainer\.num_rank\. .*\. A run of another version goes on with that one: env"
    with pytest.raises(ConfigError, match=of_another):
        load_resolved_yaml("trainer: {num_rank: 2}", subject="F: ")


@pytest.mark.parametrize("text", ["reward: 3", "reward: {parts: [1]}", "rollout: []", "3", "[" * 9999])
def test_a_damaged_config_of_a_run_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^F: .+"):
        load_resolved_yaml(text, subject="F: ")


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("run.name=Übung", "Übung"),
        ("run.name=日本語 2", "日本語 2"),
        ("run.name=l’essai: 1", "l’essai: 1"),
        ('run.name="Übung"', "Übung"),
        ("data.columns={answer:Lösung, level: x}", {"answer": "Lösung", "level": "x"}),
        ("data.columns.answer=答え", {"answer": "答え"}),
        ('data.columns={"answer": "Lösung", "level":"x"}', {"answer": "Lösung", "level": "x"}),
        ('data.columns={"answer": "label"}', {"answer": "label"}),
        ("rollout.sampling.stop=[。,'b, ö', c d]", ["。", "b, ö", "c d"]),
    ],
)
def test_letters_beyond_ascii_need_no_quotes_and_names_may_have_them(word: str, read: object, tmp_path: Path) -> None:
    """Hydra's grammar takes such letters in quotes alone, and names of a mapping without them alone."""

    def value(config: RunConfig) -> object:
        found: object = config
        for name in word.partition("=")[0].removesuffix(".answer").split("."):
            found = getattr(found, name)
        return list(found) if isinstance(found, tuple) else found

    words = [QUICKSTART, word]
    config = load_run_config(words)
    saved = resolved_yaml(config)
    assert [value(one) for one in (config, load_run_config(words, tmp_path))] == [read] * 2
    assert load_resolved_yaml(saved) == load_resolved_yaml(saved, [word]) == config
    load.check_model_reads_overrides(config, [word], {})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.columns.größe=x", "names are ASCII; give others in a YAML file"),
        ("data.columns={größe:x}", "names are ASCII; give others in a YAML file"),
        ("größe=3", "unknown option größe"),
        ("run.num_steps=–5", "run.num_steps must be an integer, got '–5'"),
        ('run.name=ü"', "quote it twice, as in 'run.name=\"...\"'"),
        ("experiment=größe", "experiment has no such choice"),
    ],
)
def test_what_beyond_ascii_cannot_be_read_is_one_message(word: str, message: str) -> None:
    assert message in refusal_of(word)


@pytest.mark.parametrize("words", [[], ["data.max_prompt_tokens=32"], ["algorithm=dr_grpo"]])
def test_a_command_that_reads_no_rows_needs_none(words: list[str]) -> None:
    model = ["model=tiny_qwen3_moe", "rollout=small", *words]
    with pytest.raises(ConfigError, match=r"data\.path is required"):
        load_run_config(model)
    assert load_run_config(model, reads_rows=False).data.training_sources
    for given in (["data=letters"], ["data.path=mine.jsonl"], ["data.sources=[a.jsonl]"], ["experiment=quickstart"]):
        assert load_run_config([*model, *given], reads_rows=False) == load_run_config([*model, *given])
