"""Checks of the code and the services that a run is given: reward, agent, loss, advantage and teacher are tried before.

Owns: how each is tried, in a process of its own where it is the user's code.
"""

import pickle
import socket
import subprocess
from collections.abc import Sequence
from urllib.parse import urlsplit

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import is_function_path
from slipstream.conf.plural import counted
from slipstream.conf.schema import ANSWER, Objective, RunConfig
from slipstream.orchestrator.files.kept_code import AGENT_COPY, edited, edited_algorithm, own_algorithm
from slipstream.orchestrator.inputs.character_tokenizer import CHARACTERS
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.own_advantage import try_advantage
from slipstream.orchestrator.inputs.rows.prompt_rows import first_prompts
from slipstream.orchestrator.inputs.text_encoder import template_knows_tools, tokenizer_folder
from slipstream.rollout.agents.episode_runner import check_agent
from slipstream.rollout.agents.tool_calls import parser_names
from slipstream.rollout.in_vllm.fork_server import python_calls
from slipstream.rollout.rewards.runner import check_reward

TRY_S = 300.0
"""Longest that a loss of the user's own may take to be tried, PyTorch's import included."""
CONNECT_S = 3.0
_PORTS = {"http": 80, "https": 443}
DEFAULT_REWARD = "exact_match"
_MEANING = f"1 if a response equals the row's column {ANSWER!r}, otherwise 0"


def check_reward_loads(config: RunConfig) -> Fact | None:
    """The reward can be set up; tried in a process of its own, as in the run. A judge that cannot be reached now may be
    there when the run asks it: a warning."""
    if config.algorithm.objective is not Objective.policy:
        return None
    files = check_reward(config.reward)
    judges = {part.judge.base_url for part in config.reward.by_name.values() if part.kind == "judge"}
    silent = [found for url in sorted(judges) if (found := _cannot_be_reached(url))]
    return Fact("reward", "; ".join([who_judges(config), *silent]) + edited(config, files), is_warning=bool(silent))


def who_judges(config: RunConfig) -> str:
    """Where rewards come from, for people: the rewards with their weights, or the agent, and the reward that somebody
    chose for episodes of which the agent returns None."""
    reward, agent = config.reward, config.rollout.agent
    parts = ", ".join(f"{part.weight:g} x {name}" for name, part in reward.by_name.items()) if reward.parts else ""
    if agent is not None:
        return "what the agent returns" + (
            "" if _is_default(config) else f"; where that is None, {parts or reward.kind}"
        )
    return parts or (f"{DEFAULT_REWARD}: {_MEANING}" if reward.kind == DEFAULT_REWARD else reward.kind)


def unchosen_reward(config: RunConfig, overrides: Sequence[str]) -> str:
    """The line that says that a new run's reward is the default one; empty if a word chose it, or an agent judges."""
    is_chosen = any(word.lstrip("+~").startswith("reward") for word in overrides)
    trains = config.algorithm.objective is Objective.policy and config.run.num_steps > 0 and config.run.resume is None
    if is_chosen or not trains or config.rollout.agent is not None or not _is_default(config):
        return ""
    return (
        f"reward: {DEFAULT_REWARD}, which no word of the command chose: {_MEANING}; another: reward=math, or "
        "reward.kind=FILE.py:function (docs/rewards.md)"
    )


def _is_default(config: RunConfig) -> bool:
    return config.reward.kind == DEFAULT_REWARD and not config.reward.parts


def _cannot_be_reached(url: str) -> str:
    """Why no connection to a judge can be made, and what that means; empty if one can."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or _PORTS[parts.scheme]), CONNECT_S):
            return ""
    except (OSError, ValueError) as error:
        return f"the judge at {url} cannot be reached ({error}): start it, or repair the address"


def check_algorithm_loads(config: RunConfig) -> Fact | None:
    """A loss and an advantage of the user's own can be imported and called; the loss in a process of its own."""
    algorithm, own = config.algorithm, own_algorithm(config)
    if not own:
        return None
    problems: list[str] = []
    if is_function_path(algorithm.advantage):
        try:
            try_advantage(config, first_prompts(config, most_rows=2))
        except ConfigError as error:
            problems.append(str(error))
    if is_function_path(algorithm.loss):
        command = python_calls("slipstream.trainer.step.own_loss:try_what_is_given")
        tried = subprocess.run(command, input=pickle.dumps(algorithm), capture_output=True, timeout=TRY_S, check=False)
        if tried.returncode != 0:
            said = tried.stderr.decode(errors="replace").strip().splitlines()
            problems.append(said[-1] if said else f"algorithm.loss={algorithm.loss} ended its process")
    if problems:
        raise ConfigError("; ".join(problems))
    return Fact("algorithm", " and ".join(own.values()) + edited_algorithm(config))


def check_teacher_answers(config: RunConfig) -> Fact | None:
    """The teacher of distillation is there, and its tokens are the policy's."""
    if config.algorithm.objective is not Objective.policy or config.algorithm.distill_coef == 0:
        return None
    if config.run.num_steps == 0:
        return Fact("teacher", "not asked: no step is made")
    from slipstream.orchestrator.inputs.teacher_check import check_teacher  # imports httpx

    return Fact("teacher", check_teacher(config))


def check_agent_loads(config: RunConfig) -> Fact | None:
    """The agent can be imported, tried in a process of its own; its tool parser is known and its port is free."""
    name, episodes = config.rollout.agent, config.rollout.episodes
    if name is None or config.algorithm.objective is not Objective.policy:
        return None
    known = parser_names()
    if episodes.tool_parser is not None and known and episodes.tool_parser not in known:
        raise ConfigError(
            f"rollout.episodes.tool_parser={episodes.tool_parser} is none of vLLM's: give one of {', '.join(known)}"
        )
    _check_template_knows_tools(config)
    try:
        family, kind, *_, address = socket.getaddrinfo(*episodes.host_and_port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"rollout.episodes.address={episodes.address}: {error.strerror or error}; give an address of this machine "
            "and a free port, or port 0 for any"
        ) from error
    files = {AGENT_COPY: check_agent(config)}
    turns = counted(episodes.max_turns, "turn")
    return Fact("agent", f"{name}, at most {turns}{edited(config, files)}")


def _check_template_knows_tools(config: RunConfig) -> None:
    """A parser of tool calls is for an agent with tools, which the chat template must show to the model."""
    folder = tokenizer_folder(config.model)
    is_characters = config.model.tokenizer == CHARACTERS  # its template knows none
    if config.rollout.episodes.tool_parser is None or not (is_characters or folder.is_dir()):
        return
    if is_characters or not template_knows_tools(folder):
        raise ConfigError(
            f"rollout.episodes.tool_parser={config.rollout.episodes.tool_parser}, and the chat template of "
            f"{'model.tokenizer=characters' if is_characters else folder} writes no tools: a model would never see "
            "them; give model.tokenizer=FOLDER with a template that does, or rollout.episodes.tool_parser=null"
        )


CODE_CHECKS = (check_reward_loads, check_algorithm_loads, check_teacher_answers, check_agent_loads)
