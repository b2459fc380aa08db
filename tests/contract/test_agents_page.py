"""The first example of docs/agents.md is an agent: its file as it stands there, on rows of text and of chat messages.

Service, agents' processes, HTTP, the published template of Qwen3 and vLLM's parser are real; a script stands in for the
engine.
"""

import re
from pathlib import Path

import pytest
from fakes.template_tokenizer import QWEN, QWEN_PLAIN, save_template_tokenizer
from tokenizers import Tokenizer

from slipstream.conf.schema import EpisodesConfig, RolloutConfig, RunConfig, SamplingConfig
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.types import Prompt, Rollout

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
SAYS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "add", "arguments": {"c": 1}}\n</tool_call><|im_end|>',
    "42<|im_end|>",
)


async def test_the_first_example_runs_on_rows_of_text_and_of_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert first is not None
    (tmp_path / "my_agent.py").write_text(first[1])
    model = tmp_path / "model"
    model.mkdir()
    save_template_tokenizer(model, "qwen3", QWEN, QWEN_PLAIN)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    given: dict[int, list[str]] = {}

    async def generate(prompt: Prompt, sampling: SamplingConfig) -> Rollout:
        turns = given.setdefault(prompt.prompt_id, [])
        turns.append(tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))
        tokens = tokenizer.encode(SAYS[len(turns) - 1], add_special_tokens=False).ids
        return Rollout(tokens, [-1.0] * len(tokens), [0] * len(tokens), "", "stop")

    config = RunConfig(
        rollout=RolloutConfig(
            agent=f"{tmp_path / 'my_agent.py'}:agent",
            episodes=EpisodesConfig(tool_parser="hermes"),
            sampling=SamplingConfig(max_tokens=200),
        )
    )
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "17 + 25?"}]
    runner = EpisodeRunner(config, model, log_path=tmp_path / "agents.log")
    try:
        await runner.start()
        runner.sample_with(generate)
        of_text = await runner.run_group(Prompt(0, (1,), "17 + 25?", {"answer": "42"}), 1)
        of_messages = await runner.run_group(Prompt(1, (1,), "", {"answer": 42}, messages=messages), 1)
    finally:
        await runner.close()
    for number, (episode,) in enumerate((of_text, of_messages)):
        assert (episode.rollout.failure, episode.reward) == ("", 1.0), caplog.text
        assert '"name": "add"' in given[number][0], "the model sees the tool"
        assert "<tool_response>\n42\n</tool_response>" in given[number][1]
        assert "error: KeyError('a')" in given[number][2], "a call without its arguments gets the error"
    assert "<|im_start|>system\nAdd." in given[1][0]
