"""The list of options is frozen: adding, renaming or removing one is a visible diff here and in docs/options.md."""

from pathlib import Path

from slipstream.conf.options import flat_options, render_markdown, section_docs

OPTIONS = """
run: name dir resume checkpoint_dir seed num_steps checkpoint_every_steps keep_checkpoints keep_best eval_every_steps
    eval_samples_per_prompt eval_right_from eval_beside samples_per_step loggers project
model: path init hf_config dtype engine_format tokenizer
trainer: num_ranks ep_size cp_size mode
trainer.lora: rank attention_rank expert_rank alpha dtype targets init_from
trainer: train_router
trainer.optim: lr betas weight_decay warmup_steps final_lr_fraction state max_grad_norm
trainer: max_microbatch_tokens activations gate_up_kept embedding_on_host
trainer.numerics: match
trainer: cuda_graph_tokens max_restarts
rollout: num_workers tp_size workers_per_gpu enable_expert_parallel
rollout.sampling: temperature max_tokens stop_at_eos stop stop_token_ids seed
rollout: agent
rollout.episodes: max_turns max_tokens timeout_s num_processes env tool_parser address
rollout.eval: temperature top_p top_k seed
rollout: max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization kv_cache_bytes enforce_eager
    engine_options max_concurrent_groups request_timeout_s notice max_restarts
weight_sync: mode rounding transport watermark_bytes delta_bytes remote_merge pause_mode timeout_s relay
    trace_every_steps
algorithm: objective sequences_per_step dpo_beta group_size groups_per_step max_staleness_steps minibatches_per_step
    epochs_per_step advantage distill_coef
algorithm.teacher: base_url model api_key_env timeout_s
algorithm: normalization mask_truncated loss clip_low clip_high dual_clip ratio_baseline correction correction_min
    correction_max kl_coef kl_estimator kl_in entropy_coef drop_zero_variance_groups
parity: warn_k3 stop_k3 mask_log_ratio replay_routing
data: path sources weights eval_path eval_sets columns stream order prompt_key max_sequence_tokens max_prompt_tokens
    drop_too_long chat_template_kwargs
reward: kind weight pattern timeout_s num_processes max_concurrent env
reward.judge: base_url model api_key_env prompt_file scale extra requests_per_minute cache_path
reward.code: partial wall_s memory_bytes
reward: parts keep_special_tokens overlong_tokens overlong_penalty length_penalty
cluster: device share_gpu ray_address dashboard start_timeout_s
"""
"""By section, in their order: one that has sections of its own comes again behind each of them."""


def test_option_list_is_the_one_written_here() -> None:
    sections = (line.split(": ") for line in OPTIONS.replace("\n    ", " ").strip().splitlines())
    written = [f"{section}.{leaf}" for section, leaves in sections for leaf in leaves.split()]
    assert [option.name for option in flat_options()] == written


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
    assert page.read_text(encoding="utf-8") == render_markdown(), (
        "run: python -m slipstream.conf.options > docs/options.md"
    )
