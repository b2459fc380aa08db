"""The loss of pairs of answers of which one is preferred: direct preference optimization.

Owns: the formula. Does not own: the reference's log-probabilities (policy_forward.py), how a pair stays together
(microbatches.pack takes it as one item), or which tokens are of an answer (orchestrator/inputs/rows/preferences.py).

With y_c the chosen and y_r the rejected answer to a prompt x (Rafailov et al. 2023, arXiv:2305.18290, eq. 7):

    reward r(y) = dpo_beta * (log pi(y | x) - log ref(y | x))        a sum over the answer's tokens
    loss        = -log sigmoid(r(y_c) - r(y_r))                      the mean over pairs

Invariant: sequences 2 p and 2 p + 1 of a microbatch are the chosen and the rejected one of its pair p, and both have
tokens that count. Shapes: N counted tokens; there are at most N pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.conf.schema import AlgorithmConfig
from slipstream.trainer.step.corrections import per_sequence
from slipstream.trainer.step.loss import CountedTokens, PolicyLoss
from slipstream.trainer.types import Denominators


def dpo_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: CountedTokens,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
    mask_log_ratio: float = 0.0,
) -> PolicyLoss:
    """The loss of the module docstring, summed over the microbatch's pairs and divided by the batch's number of pairs.
    Sums are float64. Arguments as in policy_loss."""
    if tokens.ref_logprobs_N is None:
        raise ValueError("algorithm.objective=dpo needs the reference policy's log-probabilities")
    pair_N = tokens.sequence_index_N // 2
    is_chosen_N = tokens.sequence_index_N % 2 == 0
    reward_N = algorithm.dpo_beta * (logprobs_N - tokens.ref_logprobs_N).double()
    chosen_P = per_sequence(reward_N * is_chosen_N, pair_N)
    rejected_P = per_sequence(reward_N * ~is_chosen_N, pair_N)
    is_pair_P = per_sequence(torch.ones_like(reward_N), pair_N) > 0  # zeros lie behind the last one
    margin_P = chosen_P - rejected_P
    loss_P = -logsigmoid(margin_P) * is_pair_P
    loss = loss_P.sum() / (denominators.num_sequences / 2)
    sums = {
        "loss/total_sum": loss,
        "policy/num_tokens": torch.ones_like(logprobs_N),
        "policy/entropy_sum": entropy_N,
        "dpo/num_pairs": is_pair_P,
        "dpo/loss_sum": loss_P,
        "dpo/num_preferred": margin_P > 0,
        "dpo/margin_sum": margin_P,
        "dpo/chosen_reward_sum": chosen_P,
        "dpo/rejected_reward_sum": rejected_P,
    }
    return PolicyLoss(loss, {name: value.detach().double().sum() for name, value in sums.items()})
