"""What bench/trainer.py runs: our trainer, and transformers + PEFT, on the same weights drawn by name from one seed.

Owns how each is built, and one step of it. Does not own timing. A row has `facts`, for the report, and `step`, which
takes the token ids of one sequence and returns its loss before the update. Unsloth's row is in unsloth_row.py.
transformers and PEFT are imported inside functions, because in Unsloth's process they must be imported after Unsloth.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEED = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trainer rank stands among the others, and where they meet."""

    num_ranks: int = 1
    ep_size: int = 1
    cp_size: int = 1
    rank: int = 0
    rendezvous: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of TrainerConfig."""


class Ours:
    """The product's TrainerRank, used as in a run."""

    def __init__(
        self, config: dict[str, Any], state: str, args: argparse.Namespace, place: Place | None = None
    ) -> None:
        from slipstream.conf import schema
        from slipstream.trainer.rank import TrainerRank
        from slipstream.trainer.types import TrainerOptions

        adapters = "float32" if state in ("float32", "host") else "bfloat16"
        moments = "bfloat16" if state == "offload" else state
        place = place or Place()
        self.rank = TrainerRank(
            TrainerOptions(
                model=schema.ModelConfig(init=schema.Init.random, hf_config=config, dtype=schema.DType.bfloat16),
                trainer=schema.TrainerConfig(
                    lora=schema.LoraConfig(rank=args.rank, alpha=2.0 * args.rank, dtype=schema.DType(adapters)),
                    optim=schema.OptimConfig(lr=1e-5, state=schema.OptimState(moments)),
                    activations=schema.Activations.host if state == "offload" else schema.Activations.recompute,
                    embedding_on_host=state == "int8",
                    num_ranks=place.num_ranks,
                    ep_size=place.ep_size,
                    cp_size=place.cp_size,
                    **place.options,
                ),
                algorithm=schema.AlgorithmConfig(objective=schema.Objective.sft),
                sampling_temperature=1.0,
                weight_sync=schema.WeightSyncConfig(),
                seed=SEED,
                num_steps=1000,
                rendezvous=place.rendezvous,
                device=args.device,
                hf_config=config,
                sync_key=b"slipstream-bench-trainer",
            ),
            rank=place.rank,
        )
        self.facts = {"backends": self.rank.load()["backends"]}
        self.rank.states._writes.finish()  # it page-locks memory for checkpoints, and the device waits for that

    @property
    def graph_bytes(self) -> int:
        """Device memory of CUDA graphs, which torch does not count as allocated."""
        graphs = self.rank.policy.graphs
        return 0 if graphs is None else graphs.peak_bytes

    @property
    def decoder(self) -> Any:
        return self.rank.decoder

    def keep_gate_up(self, share: float) -> None:
        """Train from now on as with this trainer.gate_up_kept."""
        from slipstream.trainer.model.layer import is_in_share

        for layer in self.decoder.model.layers:
            layer.keeps_gate_up = is_in_share(layer.moe_index, share)

    def begin_length(self, gate_up_kept: float | None) -> None:
        """As a run that has only the length that comes next. None: trainer.gate_up_kept stays."""
        if (graphs := self.rank.policy.graphs) is not None:
            graphs.forget()
        if gate_up_kept is not None:
            self.keep_gate_up(gate_up_kept)

    def step(self, token_ids: Any) -> float:
        """Forward, backward, update. Returns the mean negative log-probability before the update."""
        import numpy as np

        from slipstream.trainer.types import Denominators, Sample

        num_tokens = len(token_ids)
        mask = np.arange(num_tokens) > 0
        sample = Sample(
            token_ids=token_ids.astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.zeros(num_tokens, np.float32),
            advantages=mask.astype(np.float32),
            oldest_version=self.rank.policy_version,
        )
        denominators = Denominators(int(mask.sum()), 1, self.rank.policy_version)
        stats = self.rank.forward_backward([[sample]], denominators)
        self.rank.optimizer_step()
        return stats.sums["sft/nll_sum"] / int(mask.sum())


class Peft:
    """transformers + PEFT, with experts through grouped_mm if the device has it."""

    def __init__(self, config: dict[str, Any], state: str, args: argparse.Namespace) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        kwargs = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
        hf = Qwen3MoeConfig(**kwargs, use_cache=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.to_empty(device=args.device)
        fill_hf(model, config, args.device)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("grouped_mm")
        lora = LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            bias="none",
        )
        self._model: Any = get_peft_model(model, lora, autocast_adapter_dtype=state == "float32")
        self._model.train()
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model.enable_input_require_grads()
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        self._adamw = torch.optim.AdamW(trainable, lr=1e-5, weight_decay=0.0, fused=True)
        self._trainable, self._device = trainable, args.device
        experts = getattr(hf, "_experts_implementation", None)
        self.facts = {
            "num_trainable": sum(p.numel() for p in trainable),
            "adapter_dtypes": sorted({str(p.dtype) for p in trainable}),
            "experts": str(experts),
        }

    def step(self, token_ids: Any) -> float:
        """Forward, backward, update. Returns the loss before the update."""
        import torch

        ids = torch.from_numpy(token_ids).to(self._device)[None]
        loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trainable, 1.0, foreach=True)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(loss.detach())


def fill_hf(model: Any, config: dict[str, Any], device: str) -> None:
    """Fill in the values that TrainerRank draws, by checkpoint name; transformers stacks experts."""
    import torch

    from slipstream.conf.architecture.families import read_config
    from slipstream.trainer.weights.loading import RandomReader
    from slipstream.weight_sync.layout import Region

    spec = read_config(config)
    reader = RandomReader(spec, seed=SEED, std=0.02, device=device)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for meta in spec.checkpoint_tensors("bfloat16"):
            values = reader.read(meta.name, Region((0,) * len(meta.shape), meta.shape))
            prefix, _, rest = meta.name.partition(".experts.")
            if not rest:
                params[meta.name].copy_(values)
                continue
            expert, leaf, _ = rest.split(".")
            width = config["moe_intermediate_size"]
            if leaf == "down_proj":
                params[f"{prefix}.experts.down_proj"][int(expert)].copy_(values)
            else:
                rows = slice(0, width) if leaf == "gate_proj" else slice(width, 2 * width)
                params[f"{prefix}.experts.gate_up_proj"][int(expert), rows].copy_(values)
        for module in model.modules():  # inverse frequencies: not in a checkpoint, undefined after to_empty()
            if hasattr(module, "inv_freq"):
                half = torch.arange(0, config["head_dim"], 2, dtype=torch.float32, device=device)
                module.inv_freq = 1.0 / config["rope_theta"] ** (half / config["head_dim"])
                if hasattr(module, "original_inv_freq"):
                    module.original_inv_freq = module.inv_freq
