"""TRL's and verl's own functions on the tensors of cases.py. Needs both (`make oracles`)."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oracles.cases import LENGTHS, LONGEST, Case, inputs, padded

AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
"""verl's name of each of our normalizations."""


def theirs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The peer's loss, and its gradient with respect to log-probabilities and entropies."""
    given = inputs()
    logprobs, entropy = given["logprobs"].requires_grad_(), given["entropy"].requires_grad_()
    tensors = {name: padded(value) for name, value in given.items()}
    tensors["mask"] = padded(torch.ones(sum(LENGTHS), dtype=torch.float64))
    loss = (_verl if case.peer == "verl" else _trl)(case, tensors)
    by_logprobs, by_entropy = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    return loss.detach(), by_logprobs, torch.zeros_like(entropy) if by_entropy is None else by_entropy


def _verl(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """As its actor adds them: policy loss - entropy_coeff * entropy + kl_loss_coef * penalty, each aggregated alike."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    options = case.options
    dual_clip = options.get("dual_clip", 1e9)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options.get("clip_low", 0.2),
        clip_ratio_high=options.get("clip_high", 0.28),
        clip_ratio_c=dual_clip,
        tau_pos=1.0,
        tau_neg=1.05,
    )
    mode = AGGREGATION[options.get("normalization", "token")]
    function = core_algos.get_policy_loss_fn(case.function)
    weights = None
    if "correction_max" in options:
        weights = (tensors["old"] - tensors["rollout"]).exp().clamp(max=options["correction_max"])
    loss, _ = function(
        tensors["old"],
        tensors["logprobs"],
        tensors["advantages"],
        tensors["mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    if options.get("entropy_coef"):
        loss = loss - options["entropy_coef"] * core_algos.agg_loss(tensors["entropy"], tensors["mask"], mode)
    if options.get("kl_coef"):
        penalty = core_algos.kl_penalty(tensors["logprobs"], tensors["ref"], options["kl_estimator"].value)
        loss = loss + options["kl_coef"] * core_algos.agg_loss(penalty, tensors["mask"], mode)
    return loss


def _trl(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """GRPOTrainer._compute_loss of a trainer that has the log-probabilities already."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = case.options
    high = options.get("clip_high", 0.28)
    clips_weight = case.function == "cispo"  # its epsilon_high is the bound itself
    trainer = SimpleNamespace(
        loss_type=case.function,
        importance_sampling_level="sequence" if options.get("loss") == "gspo" else "token",
        beta=options.get("kl_coef", 0.0),
        epsilon_low=options.get("clip_low", 0.2),
        epsilon_high=1.0 + high if clips_weight else high,
        entropy_coef=options.get("entropy_coef", 0.0),
        _entropy_bonus_enabled=bool(options.get("entropy_coef")),
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (tensors["logprobs"], tensors["entropy"], None),
    )
    ids = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    batch: dict[str, Any] = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": tensors["mask"].long(),
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"][:, 0],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["ref"],
        "num_items_in_batch": tensors["mask"].sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, batch)


def their_dpo(beta: float) -> tuple[Tensor, Tensor]:
    """DPOTrainer._compute_loss of a trainer whose model, and the reference in the batch, give our log-probabilities.
    Its batch has all chosen sequences first, and the logits behind its other metrics are none of the loss."""
    from trl.trainer.dpo_trainer import DPOTrainer

    given = inputs()
    logprobs = given["logprobs"].requires_grad_()
    chosen_first = [*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)]
    logprobs_SL = padded(logprobs)[chosen_first]
    ref_S = padded(given["ref"])[chosen_first].sum(dim=1)
    mask_SL = padded(torch.ones(sum(LENGTHS), dtype=torch.int64))[chosen_first]
    prompted_SL = torch.nn.functional.pad(mask_SL, (1, 0))  # one token of a prompt, which its shift takes away
    outputs = SimpleNamespace(
        log_probs=logprobs_SL, entropy=logprobs_SL, mean_logits=logprobs_SL, is_top1=mask_SL.bool()
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        beta=beta,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        ld_alpha=None,
        use_weighting=False,
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ref_chosen, ref_rejected = ref_S.chunk(2)
    batch = {
        "input_ids": prompted_SL,
        "completion_mask": prompted_SL,
        "attention_mask": prompted_SL,
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, batch, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient
