"""The list of options is frozen: adding, renaming or removing one is a visible diff here and in docs/options.md."""

from __future__ import annotations

from pathlib import Path

from conf.options import flat_options, render_markdown, section_docs

OPTIONS = [
    "run.name",
    "run.dir",
    "run.resume",
    "run.seed",
    "run.num_steps",
    "run.checkpoint_every_steps",
    "run.keep_checkpoints",
    "run.eval_every_steps",
    "run.eval_samples_per_prompt",
    "run.tensorboard",
    "model.path",
    "model.init",
    "model.hf_config",
    "model.init_std",
    "model.dtype",
    "model.mla_norm_eps",
    "model.engine_format",
    "model.tokenizer",
    "trainer.num_ranks",
    "trainer.ep_size",
    "trainer.mode",
    "trainer.lora.rank",
    "trainer.lora.attention_rank",
    "trainer.lora.expert_rank",
    "trainer.lora.alpha",
    "trainer.lora.dtype",
    "trainer.lora.attention",
    "trainer.lora.mlp",
    "trainer.lora.experts",
    "trainer.lora.init_from",
    "trainer.train_router",
    "trainer.optim.lr",
    "trainer.optim.betas",
    "trainer.optim.eps",
    "trainer.optim.weight_decay",
    "trainer.optim.warmup_steps",
    "trainer.optim.final_lr_fraction",
    "trainer.optim.state",
    "trainer.optim.max_grad_norm",
    "trainer.max_microbatch_tokens",
    "trainer.activation_checkpointing",
    "trainer.embedding_on_host",
    "trainer.numerics.adapters",
    "trainer.numerics.norm",
    "trainer.numerics.rotation",
    "trainer.numerics.expert_activation",
    "trainer.numerics.router_weights",
    "trainer.numerics.router_logits",
    "trainer.numerics.routed_scale",
    "trainer.combine",
    "trainer.engine_forward",
    "trainer.logprob_chunk_tokens",
    "rollout.num_workers",
    "rollout.tp_size",
    "rollout.enable_expert_parallel",
    "rollout.sampling.temperature",
    "rollout.sampling.top_p",
    "rollout.sampling.max_tokens",
    "rollout.sampling.stop_at_eos",
    "rollout.eval_temperature",
    "rollout.max_model_len",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_bytes",
    "rollout.enforce_eager",
    "rollout.batch_invariant",
    "rollout.max_concurrent_groups",
    "rollout.request_timeout_s",
    "rollout.max_restarts",
    "rollout.restart_backoff_s",
    "weight_sync.enabled",
    "weight_sync.mode",
    "weight_sync.on_busy_slot",
    "weight_sync.transport",
    "weight_sync.watermark_bytes",
    "weight_sync.pause_mode",
    "weight_sync.keep_kv",
    "weight_sync.verify_hashes",
    "weight_sync.timeout_s",
    "weight_sync.publish_waves",
    "weight_sync.relay",
    "weight_sync.trace_every_steps",
    "algorithm.objective",
    "algorithm.sequences_per_step",
    "algorithm.group_size",
    "algorithm.groups_per_step",
    "algorithm.max_staleness_steps",
    "algorithm.advantage_scale",
    "algorithm.shuffle_advantages",
    "algorithm.normalization",
    "algorithm.mask_truncated",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.ratio_baseline",
    "algorithm.correction",
    "algorithm.correction_min",
    "algorithm.correction_max",
    "algorithm.kl_coef",
    "algorithm.drop_zero_variance_groups",
    "algorithm.max_uninformative_batches",
    "parity.warn_k3",
    "parity.stop_k3",
    "parity.mask_log_ratio",
    "parity.floor_every_steps",
    "parity.floor_sequences",
    "parity.replay_routing",
    "data.path",
    "data.eval_path",
    "data.prompt_key",
    "data.response_key",
    "data.messages_key",
    "data.max_sequence_tokens",
    "data.max_prompt_tokens",
    "data.shuffle",
    "data.add_special_tokens",
    "reward.kind",
    "reward.answer_key",
    "reward.pattern",
    "reward.keep_special_tokens",
    "reward.timeout_s",
    "reward.num_processes",
    "reward.env",
    "cluster.device",
    "cluster.trainer_gpus",
    "cluster.rollout_gpus",
    "cluster.ray_address",
    "cluster.dashboard",
    "cluster.dashboard_port",
    "cluster.object_store_bytes",
    "cluster.start_timeout_s",
]


def test_option_list_is_the_one_written_here() -> None:
    assert [option.name for option in flat_options()] == OPTIONS


def test_every_option_and_section_is_documented() -> None:
    undocumented = [option.name for option in flat_options() if len(option.doc) < 10]
    assert not undocumented, "write a string under the field in conf/schema/"
    assert not [name for name, doc in section_docs().items() if not doc]


def test_names_of_options_that_have_a_unit_carry_it() -> None:
    """A name that ends in a quantity says in what: seconds, bytes, tokens or steps."""
    for option in flat_options():
        leaf = option.name.rsplit(".", 1)[-1]
        assert not leaf.endswith(("timeout", "interval", "size_mb", "_ms_", "duration")), option.name


def test_options_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == render_markdown(), "run: python -m conf.options > docs/options.md"
