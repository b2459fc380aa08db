"""Options of rewards that make no sense are refused in one message; parts survive the file that a run keeps."""

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config, resolved_yaml

JUDGE = "reward=judge reward.judge.base_url=http://localhost/v1 reward.judge.model=m "
PARTS = "reward.parts.right.kind=regex "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reward=code reward.code.wall_s=0", r"reward\.code\.wall_s must be > 0, got 0"),
        ("reward=code reward.code.memory_bytes=100", r"reward\.code\.memory_bytes must be >= 1048576, got 100"),
        ("reward=exact_match reward.code.wall_s=3", r"reward\.code\.wall_s has no effect with reward\.kind="),
        ("reward.parts.a.kind=code reward.parts.a.code.memory=3", r"unknown option reward\.parts\.a\.code\.memory"),
        ("reward.parts.a.kind=code reward.parts.a.code=3", r"reward\.parts\.a\.code is a section"),
        ("reward=judge", r"reward\.judge\.base_url must be the address of an OpenAI endpoint, .*, got ''"),
        (JUDGE.rpartition("reward.")[0], r"model must be the name of a model at http://localhost/v1, got nothing"),
        (JUDGE + "reward.judge.base_url=localhost:8000", r"reward\.judge\.base_url must be .*, got 'localhost:8000'"),
        (JUDGE + "reward.judge.scale=[10,10]", r"reward\.judge\.scale must be two numbers.*got \[10"),
        (JUDGE + "reward.judge.requests_per_minute=20", r"lets the last of .* wait 192 s, and reward\.timeout"),
        ("reward.judge.model=m", r"reward\.judge\.model has no effect with reward\.kind="),
        ("reward.parts.a.kind=judge", r"reward\.parts\.a\.judge\.base_url must be"),
        (PARTS + "reward.parts.b.knd=regex", r"unknown option reward\.parts\.b\.knd\. Did you mean kind\?"),
        (PARTS + "reward.parts.b=3", r"reward\.parts\.b must be a mapping of options, got 3"),
        (PARTS + "reward.parts.b.weight=much", r"reward\.parts\.b\.weight must be a number, got 'much'"),
        (PARTS + "reward.parts.b.weight=.inf", r"reward\.parts\.b\.weight must be a number"),
        (PARTS + "reward.parts.b.weight=nan", r"reward\.parts\.b\.weight must be finite, got nan"),
        (PARTS + "reward.parts.b.kind=rgex", r"reward\.parts\.b\.kind must be exact_match, .*, got 'rgex'"),
        (PARTS + "reward.parts.b.env=KEY", r"reward\.parts\.b\.env must be a list of texts, got 'KEY'"),
        (PARTS + "reward.parts.b.timeout_s=0", r"reward\.parts\.b\.timeout_s must be > 0, got 0"),
        (PARTS + "reward.parts.mean-1.kind=regex", r"a reward's name must be a word of .*, got 'mean-1'"),
        (PARTS + "reward.pattern=x", r"reward\.pattern has no effect with reward\.parts, each of which has its own"),
        (PARTS + "reward.parts.length_penalty.kind=regex", "neither of overlong_penalty, length_penalty, got"),
        ("reward.overlong_tokens=9999", r"reward\.overlong_tokens=9999 exceeds the 4 tokens"),
        ("reward.overlong_tokens=-1", r"reward\.overlong_tokens must be >= 0, got -1"),
        ("reward.overlong_penalty=2", r"reward\.overlong_penalty has no effect with reward\.overlong_tokens=0"),
        ("reward.length_penalty=nan", "penalties must be finite, got nan"),
    ],
)
def test_a_wrong_option_has_one_message(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(["experiment=quickstart", *words.split()])


def test_parts_survive_the_file_that_a_run_keeps() -> None:
    words = (PARTS + "reward.parts.b.kind=mine.py:b reward.parts.b.env=[KEY]").split()
    config = load_run_config(["experiment=quickstart", *words])
    assert load_resolved_yaml(resolved_yaml(config)) == config
    assert config.reward.names == ("right", "b")
    assert config.reward.by_name["b"].env == ("KEY",)
