"""Log-probabilities that a teacher gives to sampled tokens, over OpenAI's completions protocol.

    sequences of a rollout (rollout.branches) --token ids--> POST /completions --ids compared--> one number per token

Owns: what is asked, what an answer must hold, how many responses are asked about at the same time, and what is counted.
Invariants: token ids are sent and come back, so that no text is tokenized again; the numbers are of those ids, of
softmax(logits), whatever the policy's temperature is. No answer, or one about other tokens, leaves the response out; it
never ends a run.

The request is that of the completions protocol with `echo`: the prompt comes back with the log-probability of each of
its tokens. `return_tokens_as_token_ids` is vLLM's: tokens are written as "token_id:17" instead of text.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence

from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import TeacherConfig
from slipstream.rollout.branches import branches_of
from slipstream.rollout.openai_client import MAX_ANSWER_BYTES, NoAnswer, OpenAIClient
from slipstream.rollout.types import Prompt, Rollout

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 1024
"""Room for each token in an answer, beside MAX_ANSWER_BYTES; vLLM's answers take about 100."""
NO_PROBABILITY = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""
ROUNDING = 1e-3
"""The most by which a log-probability may be above 0."""
_TOKEN_ID = "token_id:"


class WrongAnswer(Exception):
    """The teacher answered, but not with the log-probabilities of the tokens that it was asked about."""


def request_of(model: str, prompt: Sequence[int] | str) -> JsonObject:
    """The body that asks for the tokens of `prompt`, which is not continued, and for their log-probabilities."""
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "echo": True,
        "logprobs": 0,  # of the prompt's own tokens alone
        "max_tokens": 0,
        "temperature": 1.0,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }


def read_answer(answer: bytes) -> tuple[list[int], list[float | None]]:
    """(token ids, log-probability of each) of an answer to request_of; the first token has none. Raises WrongAnswer."""
    try:
        found = json.loads(answer)["choices"][0]["logprobs"]
        tokens, values = list(found["tokens"]), list(found["token_logprobs"])
        if not all(isinstance(token, str) and token.startswith(_TOKEN_ID) for token in tokens):
            raise WrongAnswer(
                "the teacher's tokens are texts and not ids, so that nobody can tell which ones they are: it must know "
                f"return_tokens_as_token_ids, as vLLM does; got {tokens[:3]!r}"
            )
        logprobs = [None if value is None else float(value) for value in values]
        return [int(token.removeprefix(_TOKEN_ID)) for token in tokens], logprobs
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise WrongAnswer(f"the teacher's answer has no log-probabilities: {answer[:300]!r}") from None


def logprobs_of(answer: bytes, token_ids: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first, given those before it. Raises WrongAnswer."""
    found, logprobs = read_answer(answer)
    if found != list(token_ids) or len(logprobs) != len(found):
        raise WrongAnswer(
            f"the teacher was asked about {len(token_ids)} tokens and answered about {len(found)} others, with "
            f"{len(logprobs)} log-probabilities"
        )
    known = [value for value in logprobs[1:] if value is not None and NO_PROBABILITY < value <= ROUNDING]
    if len(known) != len(found) - 1:
        raise WrongAnswer("the teacher gives a token no probability, or one that is none")
    return known


class Teacher:
    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []
        """How long each response took, since the last take_counts."""
        self._reported: set[type[Exception]] = set()
        self._client = OpenAIClient(
            "the teacher",
            config.base_url,
            timeout_option="algorithm.teacher.timeout_s",
            api_key_env=config.api_key_env,
            max_tries=config.max_tries,
            try_timeout_s=config.try_timeout_s,
            count=lambda what: self._counts.update([what]),
        )

    async def group_logprobs(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[list[float] | None]:
        """For each rollout one number per sampled token; None where the teacher failed, and the log says how."""
        return await asyncio.gather(*(self._of_rollout(prompt, rollout) for rollout in rollouts))

    def take_counts(self) -> dict[str, float | None]:
        """Since the last call: failures and retries, and the mean seconds of a response, waits for a place left out."""
        counts, seconds = self._counts, self._seconds
        self._counts, self._seconds = Counter(), []
        return {
            "failures": counts["failures"],
            "retries": counts["retries"],
            "response_s": sum(seconds) / len(seconds) if seconds else None,
        }

    async def close(self) -> None:
        await self._client.close()

    async def _of_rollout(self, prompt: Prompt, rollout: Rollout) -> list[float] | None:
        async with self._places:
            began = time.monotonic()
            deadline = began + self._config.timeout_s
            found = [0.0] * len(rollout.token_ids)
            try:
                for branch in branches_of(prompt, rollout):
                    body = request_of(self._config.model, branch.token_ids)
                    max_bytes = MAX_ANSWER_BYTES + BYTES_PER_TOKEN * len(branch.token_ids)
                    answer = await self._client.post("/completions", body, deadline, max_bytes)
                    logprobs = logprobs_of(answer, branch.token_ids)
                    sampled = [logprobs[i - 1] for i, counts in enumerate(branch.counts) if counts]
                    for place, value in zip(branch.places, sampled, strict=True):
                        found[place] = value
            except (NoAnswer, WrongAnswer) as error:
                self._counts["failures"] += 1
                if type(error) not in self._reported:
                    self._reported.add(type(error))
                    logger.warning(
                        "the teacher failed on a response to prompt %d, which is left out; more of this kind are only "
                        "counted: %s", prompt.prompt_id, error,
                    )  # fmt: skip
                return None
            finally:
                self._seconds.append(time.monotonic() - began)
            return found
