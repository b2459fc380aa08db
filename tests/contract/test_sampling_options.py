"""What a real engine's responses and log-probabilities are under each option of sampling, against a recomputation with
transformers' logits and with the trainer's head.

With z the logits, T the temperature, and S the tokens that top_k and top_p leave:

    engine    log mu(a) = log softmax(z / T)[a] - log sum over b in S of softmax(z / T)[b]
    trainer   log pi(a) = log softmax(z / T)[a]

They are equal with all tokens in S. conf/checks/sections.py refuses the rest for training.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio
import torch
from contract.test_engine_vllm import prompt
from fakes.one_worker import MAX_LOGPROB_ERROR, Checkpoints, one_worker
from tokenizers import Tokenizer
from torch import Tensor

from slipstream.conf.schema import EvalSampling, EvalSamplingConfig, RolloutConfig, SamplingConfig
from slipstream.orchestrator.inputs.character_tokenizer import SPECIAL_TOKENS
from slipstream.rollout.types import Rollout
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.model.logprobs import token_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

FREE = SamplingConfig(max_tokens=120, stop_at_eos=False, seed=1)
"""With a seed, because a token at the very bound of top_p is in S for one of two programs that are right."""
ASKED = prompt(1)
SPECIAL = len(SPECIAL_TOKENS) - 1
"""The largest id of a special token; a text leaves them out."""


@dataclass
class Served:
    """One worker that serves version 0, and the model that it serves."""

    checkpoints: Checkpoints
    worker: RolloutWorker
    tokenizer: Tokenizer

    async def sample(self, n: int, sampling: SamplingConfig) -> list[Rollout]:
        return await self.worker.generate_group(ASKED, n, sampling=sampling)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What the tokens spell, without special ones."""
        return self.tokenizer.decode(list(token_ids))

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Hidden states before, and logits at, every position that sampled a token; float32."""
        model = self.checkpoints.model(0)
        ids = torch.tensor([[*ASKED.token_ids, *rollout.token_ids]])
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        first = len(ASKED.token_ids) - 1
        return out.hidden_states[-1][0, first:-1], out.logits[0, first:-1].float()

    def trainers(self, rollout: Rollout, temperature: float) -> Tensor:
        """The trainer's log-probabilities of the response."""
        hidden_TH, _ = self.forward(rollout)
        head_VH = self.checkpoints.model(0).lm_head.weight.detach()
        targets_T = torch.tensor(rollout.token_ids)
        logprobs_T, _ = token_logprobs(hidden_TH, head_VH, targets_T, temperature=temperature, chunk_tokens=64)
        return logprobs_T.detach()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("sampling")
    config = RolloutConfig(
        max_model_len=1024, max_num_seqs=32, kv_cache_bytes=64 << 20, sampling=replace(FREE, stop=("never",))
    )
    async with one_worker(folder, Checkpoints(folder), config) as one:
        report = await one.publish(0)
        assert report.replicas[0].error is None
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        yield Served(one.checkpoints, one.worker, tokenizer)


def pairs_of(rollout: Rollout) -> list[tuple[int, int]]:
    """Every two neighbours in the response."""
    return list(zip(rollout.token_ids, rollout.token_ids[1:], strict=False))


def support(probabilities_TV: Tensor, drawing: EvalSamplingConfig) -> Tensor:
    """S as a mask: top_k, then top_p of what is left, as vLLM applies them."""
    kept_TV = torch.ones_like(probabilities_TV, dtype=torch.bool)
    if drawing.top_k:
        kept_TV &= probabilities_TV >= probabilities_TV.topk(drawing.top_k, dim=-1).values[:, -1:]
    left_TV = probabilities_TV * kept_TV
    left_TV = left_TV / left_TV.sum(-1, keepdim=True)
    ordered_TV, order_TV = left_TV.sort(dim=-1, descending=True)
    before_TV = ordered_TV.cumsum(-1) - ordered_TV  # mass of the likelier tokens
    nucleus_TV = torch.zeros_like(kept_TV).scatter(1, order_TV, before_TV < drawing.top_p)
    return kept_TV & nucleus_TV


async def test_temperature_alone_gives_the_trainers_log_probabilities(served: Served):
    for temperature in (1.0, 0.7, 1.3):
        for rollout in await served.sample(2, replace(FREE, temperature=temperature)):
            got = torch.tensor(rollout.logprobs)
            torch.testing.assert_close(got, served.trainers(rollout, temperature), atol=MAX_LOGPROB_ERROR, rtol=0)


@pytest.mark.parametrize("shaped", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}], ids=str)
async def test_what_evaluations_alone_may_ask_for_has_log_probabilities_of_another_distribution(
    served: Served, shaped: dict[str, float]
):
    """They are those of the module's docstring, and so differ from the trainer's by log sum over S."""
    drawing = EvalSamplingConfig(**shaped)
    sampling = EvalSampling(max_tokens=120, stop_at_eos=False, seed=1, temperature=0.8, drawing=drawing)
    for rollout in await served.sample(2, sampling):
        _, logits_TV = served.forward(rollout)
        probabilities_TV = (logits_TV / sampling.temperature).softmax(-1)
        chosen_T = torch.tensor(rollout.token_ids)[:, None]
        kept_TV = support(probabilities_TV, drawing)
        assert kept_TV.gather(1, chosen_T).all()
        expected_T = (probabilities_TV.gather(1, chosen_T)[:, 0] / (probabilities_TV * kept_TV).sum(-1)).log()
        got_T = torch.tensor(rollout.logprobs)
        torch.testing.assert_close(got_T, expected_T, atol=MAX_LOGPROB_ERROR, rtol=0)
        assert (got_T - served.trainers(rollout, sampling.temperature)).abs().mean() > 0.05


async def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(served: Served):
    """Two tokens make the text here. What is trained is what the engine sampled, up to that token and with it."""
    free = await served.sample(4, replace(FREE, seed=11))
    pair = next(pair for pair in pairs_of(free[0])[20:] if min(pair) > SPECIAL)
    stop = served.text_of(pair)
    assert len(stop) == 2
    stopped = await served.sample(4, replace(FREE, seed=11, stop=(stop, "never")))
    for whole, cut in zip(free, stopped, strict=True):
        is_cut = pair in pairs_of(whole)
        num_tokens = pairs_of(whole).index(pair) + 2 if is_cut else len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[:num_tokens]
        assert cut.logprobs == pytest.approx(whole.logprobs[:num_tokens], abs=MAX_LOGPROB_ERROR)
        assert cut.policy_versions == [0] * num_tokens
        assert cut.text == served.text_of(cut.token_ids)
        assert not is_cut or cut.text.endswith(stop)
        assert cut.finish_reason == ("stop" if is_cut else "length")
        torch.testing.assert_close(
            torch.tensor(cut.logprobs), served.trainers(cut, 1.0), atol=MAX_LOGPROB_ERROR, rtol=0
        )
    assert len(stopped[0].token_ids) < len(free[0].token_ids)


async def test_a_special_tokens_text_stops_as_any_other(served: Served):
    (free,) = await served.sample(1, replace(FREE, seed=3, max_tokens=400))
    eos = free.token_ids.index(2)  # with 64 words and 400 tokens
    (cut,) = await served.sample(1, replace(FREE, seed=3, max_tokens=400, stop=("<eos>",)))
    assert cut.token_ids == free.token_ids[: eos + 1]


async def test_a_stop_token_is_the_last_of_its_response(served: Served):
    free = await served.sample(4, replace(FREE, seed=12))
    stop = free[0].token_ids[9]
    stopped = await served.sample(4, replace(FREE, seed=12, stop_token_ids=(stop,)))
    for whole, cut in zip(free, stopped, strict=True):
        is_cut = stop in whole.token_ids
        assert cut.token_ids == (whole.token_ids[: whole.token_ids.index(stop) + 1] if is_cut else whole.token_ids)
        assert cut.finish_reason == ("stop" if is_cut else "length")
    assert len(stopped[0].token_ids) <= 10


async def test_a_seed_of_the_options_repeats_a_group_and_others_differ(served: Served):
    groups = [
        [rollout.token_ids for rollout in await served.sample(3, replace(FREE, seed=seed))] for seed in (5, 5, 6, None)
    ]
    assert groups[0] == groups[1]
    assert groups[0] != groups[2] and groups[0] != groups[3]
    assert len({tuple(tokens) for tokens in groups[0]}) == 3, "siblings have random numbers of their own"
