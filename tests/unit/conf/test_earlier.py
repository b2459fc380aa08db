"""Options of earlier releases: refused with the new name on the command line, carried over from old run folders."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.conf.earlier import GONE, MOVED, carried_over
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config, resolved_yaml
from slipstream.conf.options import flat_options

OLD = Path(__file__).with_name("config_of_2a38aea.yaml").read_text()
"""config.yaml of a quick start of that commit."""
NAMES = {option.name for option in flat_options()}


@pytest.mark.parametrize("name", [*MOVED, *(name for gone in GONE for name in gone.names)])
def test_an_option_of_an_earlier_release_is_refused_with_what_to_set(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^there is no option {name} any more; .+"):
        load_run_config(["experiment=quickstart", f"{name}=1"])
    assert name not in NAMES


@pytest.mark.parametrize("word", ["weight_sync=disabled", "--trainer.combine=hf_eager"])
def test_so_are_a_choice_and_an_option_with_dashes(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no option {word.strip('-').partition('=hf')[0]} any more; .+"):
        load_run_config(["experiment=quickstart", word])


def test_options_have_moved_to_options() -> None:
    assert all(new in NAMES or new.rpartition(".")[0] in NAMES for new in MOVED.values())


def test_a_run_of_an_earlier_release_goes_on() -> None:
    before, after = values_of(yaml.safe_load(OLD)), values_of(yaml.safe_load(resolved_yaml(load_resolved_yaml(OLD))))
    before["reward.kind"] = f"slipstream.{before['reward.kind']}"
    before["model.hf_config"]["initializer_range"] = before["model.init_std"]
    assert {name: after[name] for name in NAMES & set(before)} == {name: before[name] for name in NAMES & set(before)}


def values_of(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Option -> value, of all sections."""
    values: dict[str, Any] = {}
    for name, value in options.items():
        is_section = isinstance(value, dict) and f"{prefix}{name}" not in NAMES
        values |= values_of(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return values


def changed(**sections: dict[str, object]) -> str:
    options = yaml.safe_load(OLD)
    for name, changes in sections.items():
        options[name].update(changes)
    return yaml.safe_dump(options)


def test_a_moved_option_keeps_its_value() -> None:
    config = load_resolved_yaml(changed(rollout={"eval_temperature": 0.5, "eval_top_k": 7}))
    assert (config.rollout.eval.temperature, config.rollout.eval.top_k) == (0.5, 7)


MATCHED = {
    "attention": "own", "norm": "each", "rotation": "each", "dense_activation": "each", "expert_activation": "once",
    "router_weights": "model", "router_logits": "float32", "routed_scale": "weights",
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"weight_sync": {"keep_kv": True}}, {"weight_sync": {"pause_mode": "keep_kv"}}),
        ({"weight_sync": {"keep_kv": False}}, {"weight_sync": {}}),
        *(({"trainer": {"logprob_chunk_tokens": tokens}}, {"trainer": {}}) for tokens in (1024, 4096, 8192)),
        (
            {"trainer": {"numerics": MATCHED, "combine": "hf_eager"}, "model": {"mla_norm_eps": "hf"}},
            {"trainer": {"numerics": {"match": "transformers"}}, "model": {}},
        ),
        (
            {"trainer": {"numerics": {"attention": "auto"}, "combine": "vllm_like"}, "model": {}},
            {"trainer": {"numerics": {}}, "model": {}},
        ),
        (
            {
                "run": {
                    "loggers": ["wandb"],
                    "wandb": {"entity": "us", "project": "sums"},
                    "mlflow": {"experiment": "e"},
                }
            },
            {"run": {"loggers": ["wandb"], "project": "us/sums"}},
        ),
        ({"model": {"init": "checkpoint", "init_std": 0.02}}, {"model": {"init": "checkpoint"}}),
        ({"run": {"eval_pass_at": []}, "cluster": {"dashboard_port": 8265}}, {"run": {}, "cluster": {}}),
        (
            {"weight_sync": {"mode": "adapter", "pause_mode": "keep", "on_busy_slot": "requeue"}},
            {"weight_sync": {"mode": "adapter", "pause_mode": "abort"}},
        ),
        ({"data": {"curriculum": "none", "shuffle": False}}, {"data": {"order": "given"}}),
        (
            {"trainer": {"lora": {"attention": False, "mlp": True}, "activation_checkpointing": False}},
            {"trainer": {"lora": {"targets": ["mlp", "experts"]}, "activations": "keep"}},
        ),
        ({"algorithm": {"teacher": {"max_tries": 6}}}, {"algorithm": {"teacher": {}}}),
        ({"reward": {"choice_key": "reward"}}, {"reward": {}}),
    ],
)
def test_values_that_another_option_has_now_are_carried_over(old: dict[str, Any], now: dict[str, Any]) -> None:
    assert carried_over(copy.deepcopy(old)) == now


def test_options_that_became_one_are_carried_over_together() -> None:
    both = {"rollout": {"batch_invariant": True}, "trainer": {"engine_forward": True}}
    assert carried_over(both) == {"rollout": {}, "trainer": {"numerics": {"match": "bitwise"}}}
    with pytest.raises(ConfigError, match=r"has rollout.batch_invariant=True, and there is no.*choose parity=bitwise"):
        load_resolved_yaml(changed(rollout={"batch_invariant": True}))


def test_a_run_that_depends_on_a_missing_option_is_refused_in_one_line() -> None:
    text = changed(rollout={"sampling": {"top_p": 0.9}})
    with pytest.raises(ConfigError, match=r"^F: the run has rollout.sampling.top_p=0.9, and there is no.*that began"):
        load_resolved_yaml(text, subject="F: ")


def test_what_the_run_has_is_named_though_another_option_has_that_value_usually() -> None:
    text = changed(trainer={"numerics": {"dense_activation": "each", "router_logits": "float32"}})
    named = "trainer.numerics.dense_activation=each trainer.numerics.router_logits=float32"
    with pytest.raises(ConfigError, match=f"^the run has {named}, and there is no such option"):
        load_resolved_yaml(text)


def test_options_of_one_of_several_rewards_are_carried_over() -> None:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "a", "lowest": 0.0, "highest": 10.0, "max_tokens": 512}
    parts = {"good": {"kind": "judge", "judge": judge}, "runs": {"kind": "code", "code": {"tests_key": "tests"}}}
    config = load_resolved_yaml(changed(reward={"parts": parts}))
    assert config.reward.by_name["good"].judge.scale == (0, 10)
    judge = judge | {"highest": 5}
    with pytest.raises(
        ConfigError, match=r"has reward\.parts\.good\.judge\.highest=5, .*; set reward\.parts\.good\.judge\."
    ):
        load_resolved_yaml(changed(reward={"parts": {"good": {"kind": "judge", "judge": judge}}}))
    words = ["reward.parts.a.kind=judge", "reward.parts.a.judge.highest=5", "reward.parts.b.kind=regex"]
    with pytest.raises(
        ConfigError, match=r"^there is no option reward\.parts\.a\.judge\.highest any more; set reward\.parts"
    ):
        load_run_config(["experiment=quickstart", *words])


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ({"choice_key": "judges"}, r"reward\.choice_key=judges, which is data\.columns\.reward now"),
        ({"kind": "code", "code": {"tests_key": "a"}}, r"reward\.code\.tests_key=a, which is data\.columns\.tests now"),
        (
            {"parts": {"p": {"kind": "code", "code": {"tests_key": "a"}}}},
            r"reward\.parts\.p\.code\.tests_key=a, which is data\.columns\.tests now",
        ),
    ],
)
def test_a_run_whose_rows_have_other_columns_is_refused_in_one_line(reward: dict[str, object], named: str) -> None:
    """Its checkpoints are of other data.columns, and prompts that wait in them lack the column of the new name."""
    with pytest.raises(ConfigError, match=rf"^the run has {named}, .*go on with the release that began the run$"):
        load_resolved_yaml(changed(reward=reward))


@pytest.mark.parametrize("text", ["reward: 3", "reward: {parts: [1]}", "rollout: []"])
def test_a_damaged_file_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^F: .+"):
        load_resolved_yaml(text, subject="F: ")
