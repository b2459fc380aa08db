"""What options of verl, TRL, prime-rl and earlier versions are called here, for the message about an unknown option.

The table of the former, with its remarks, is docs/coming_from.md; a unit test compares the two.
"""

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "model.path": "actor_rollout_ref.model.path model.name",
    "trainer.num_ranks": "trainer.n_gpus_per_node trainer.nnodes deployment.num_train_gpus",
    "rollout.num_workers or rollout.tp_size": "rollout.n_gpus_per_node rollout.nnodes deployment.num_infer_gpus",
    "rollout.tp_size": "actor_rollout_ref.rollout.tensor_model_parallel_size vllm_tensor_parallel_size inference.vllm.tensor_parallel_size",
    "trainer.ep_size": "actor_rollout_ref.actor.megatron.expert_model_parallel_size trainer.model.ep",
    "trainer.cp_size": "actor_rollout_ref.actor.megatron.context_parallel_size trainer.model.cp",
    "run.num_steps": "trainer.total_training_steps trainer.total_epochs max_steps num_train_epochs",
    "algorithm.groups_per_step or algorithm.sequences_per_step": "data.train_batch_size generation_batch_size orchestrator.batch_size",
    "algorithm.group_size": "actor_rollout_ref.rollout.n num_generations orchestrator.group_size",
    "trainer.max_microbatch_tokens": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu per_device_train_batch_size gradient_accumulation_steps trainer.model.seq_len",
    "data.max_prompt_tokens": "data.max_prompt_length",
    "rollout.sampling.max_tokens": "data.max_response_length max_completion_length orchestrator.train.sampling.max_completion_tokens",
    "rollout.max_model_len": "actor_rollout_ref.rollout.max_model_len vllm_max_model_length inference.vllm.max_model_len orchestrator.seq_len",
    "rollout.sampling.temperature": "actor_rollout_ref.rollout.temperature temperature orchestrator.train.sampling.temperature",
    "rollout.gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization vllm_gpu_memory_utilization inference.vllm.gpu_memory_utilization",
    "trainer.optim.lr": "actor_rollout_ref.actor.optim.lr learning_rate",
    "trainer.optim.warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio warmup_steps warmup_ratio trainer.scheduler.warmup_steps",
    "trainer.optim.final_lr_fraction": "actor_rollout_ref.actor.optim.lr_scheduler_type lr_scheduler_type trainer.scheduler.type",
    "trainer.optim.weight_decay": "actor_rollout_ref.actor.optim.weight_decay weight_decay",
    "trainer.optim.max_grad_norm": "actor_rollout_ref.actor.optim.clip_grad max_grad_norm trainer.optim.max_norm",
    "trainer.activations": "actor_rollout_ref.model.enable_gradient_checkpointing gradient_checkpointing trainer.model.ac",
    "trainer.mode=lora": "peft_config trainer.model.lora",
    "trainer.lora.rank": "actor_rollout_ref.model.lora_rank r trainer.model.lora.rank",
    "trainer.lora.alpha": "actor_rollout_ref.model.lora_alpha lora_alpha trainer.model.lora.alpha use_rslora",
    "trainer.lora.targets": "actor_rollout_ref.model.target_modules target_modules trainer.model.lora.target_modules",
    "trainer.lora.init_from": "actor_rollout_ref.model.lora_adapter_path",
    "algorithm.advantage": "algorithm.adv_estimator scale_rewards orchestrator.algo.type",
    "algorithm.loss": "actor_rollout_ref.actor.policy_loss.loss_mode loss_type importance_sampling_level",
    "algorithm.loss=FILE.py:function": "register_policy_loss trainer.loss.type trainer.loss.import_path",
    "algorithm.minibatches_per_step": "actor_rollout_ref.actor.ppo_mini_batch_size steps_per_generation",
    "algorithm.epochs_per_step": "actor_rollout_ref.actor.ppo_epochs num_iterations",
    "algorithm.normalization": "actor_rollout_ref.actor.loss_agg_mode loss_type",
    "algorithm.clip_low": "actor_rollout_ref.actor.clip_ratio_low epsilon trainer.loss.dppo_mask_low",
    "algorithm.clip_high": "actor_rollout_ref.actor.clip_ratio_high epsilon_high trainer.loss.dppo_mask_high",
    "algorithm.correction": "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_rs vllm_importance_sampling_mode",
    "algorithm.correction_min": "vllm_importance_sampling_clip_min",
    "algorithm.correction_max": "algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_rs_threshold vllm_importance_sampling_clip_max",
    "algorithm.kl_coef": "actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef beta trainer.loss.kl_tau",
    "algorithm.kl_estimator": "actor_rollout_ref.actor.kl_loss_type",
    "algorithm.kl_in": "algorithm.use_kl_in_reward",
    "algorithm.entropy_coef": "actor_rollout_ref.actor.entropy_coeff entropy_coef",
    "algorithm.dual_clip": "actor_rollout_ref.actor.clip_ratio_c delta",
    "algorithm.mask_truncated": "mask_truncated_completions",
    "algorithm.drop_zero_variance_groups": "algorithm.filter_groups.enable orchestrator.train.filter_zero_advantages",
    "reward.overlong_tokens": "orchestrator.algo.length_penalty",
    "parity.replay_routing": "actor_rollout_ref.rollout.enable_rollout_routing_replay trainer.enable_router_replay",
    "weight_sync.transport": "actor_rollout_ref.rollout.checkpoint_engine.backend weight_broadcast.type",
    "weight_sync.watermark_bytes": "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "weight_sync.mode=adapter": "actor_rollout_ref.model.lora.merge inference.vllm.enable_lora",
    "algorithm.max_staleness_steps": "async_training.staleness_threshold max_staleness orchestrator.max_off_policy_steps",
    "weight_sync.pause_mode": "async_training.partial_rollout",
    "rollout.max_concurrent_groups or rollout.max_num_seqs": "actor_rollout_ref.rollout.max_num_seqs max_inflight_tasks orchestrator.concurrency.max_inflight",
    "data.path or data.sources": "data.train_files train_dataset orchestrator.train.source",
    "data.eval_path": "data.val_files eval_dataset orchestrator.eval.source",
    "data.chat_template_kwargs": "data.apply_chat_template_kwargs chat_template_kwargs",
    "data.prompt_key": "prompt",
    "data.columns": "reward_model.ground_truth",
    "data.drop_too_long": "data.filter_overlong_prompts",
    "reward.kind=FILE.py:function": "reward.custom_reward_function.path reward.custom_reward_function.name reward_funcs",
    "reward.parts": "reward_weights",
    "rollout.agent=FILE.py:function": "actor_rollout_ref.rollout.agent.default_agent_loop actor_rollout_ref.rollout.multi_turn tools environment_factory orchestrator.train.source",
    "run.dir or run.name": "trainer.default_local_dir trainer.experiment_name output_dir",
    "run.checkpoint_every_steps": "trainer.save_freq save_steps ckpt.interval",
    "run.eval_every_steps": "trainer.test_freq eval_steps orchestrator.eval.interval",
    "run.eval_samples_per_prompt": "actor_rollout_ref.rollout.val_kwargs.n num_generations_eval orchestrator.eval.group_size",
    "rollout.eval.temperature": "actor_rollout_ref.rollout.val_kwargs.temperature orchestrator.eval.sampling.temperature",
    "run.loggers": "trainer.logger report_to monitors.wandb",
    "slipstream merge RUN": "verl.model_merger merge_and_unload",
    "slipstream resume RUN": "trainer.resume_mode resume_from_checkpoint resume",
}
"""Our words -> options of others, row by row of the page."""
EARLIER: Mapping[str, str] = {
    "rollout.eval.top_p or rollout.eval.top_k": "rollout.eval_min_p rollout.eval_repetition_penalty rollout.eval_presence_penalty",
    "data.columns": "data.messages_key data.response_key reward.answer_key reward.choice_key reward.code.tests_key",
    "algorithm.correction": "algorithm.tis_max",
    "algorithm.advantage": "algorithm.advantage_scale algorithm.shuffle_advantages",
    "rollout.episodes.address": "rollout.episodes.host rollout.episodes.port",
    "weight_sync.pause_mode": "weight_sync.on_busy_slot weight_sync.keep_kv",
    "data.order": "data.curriculum data.shuffle",
    "trainer.activations": "trainer.activation_checkpointing trainer.activations_on_host",
    "trainer.lora.targets": "trainer.lora.attention trainer.lora.mlp trainer.lora.experts",
    "trainer.numerics.match": "trainer.numerics.adapters trainer.numerics.attention trainer.numerics.norm trainer.numerics.rotation trainer.numerics.dense_activation trainer.numerics.expert_activation trainer.numerics.router_weights trainer.numerics.router_logits trainer.numerics.routed_scale trainer.combine model.mla_norm_eps trainer.engine_forward rollout.batch_invariant",
    "trainer.num_ranks": "cluster.trainer_gpus",
    "rollout.num_workers and rollout.tp_size": "cluster.rollout_gpus",
    "model.hf_config.initializer_range": "model.init_std",
    "reward.judge.extra": "reward.judge.max_tokens reward.judge.temperature",
    "reward.judge.scale": "reward.judge.highest reward.judge.lowest",
    "reward.code.wall_s": "reward.code.cpu_s",
    "run.project": "run.wandb.project run.wandb.entity run.mlflow.experiment",
    "the environment variable MLFLOW_TRACKING_URI": "run.mlflow.tracking_uri",
    "the environment variable WANDB_MODE": "run.wandb.mode",
    "python -m bench.controls train": "weight_sync.enabled",
}
"""Our words -> options that they had, or were, before."""
CHOICES: Mapping[str, str] = {
    "algorithm=ppo": "algorithm=grpo is the nearest: there is no critic, a group's mean reward is the baseline.",
    "algorithm=remax": "algorithm=rloo is the nearest: its baseline is the group's other responses.",
    "algorithm=gkd": "algorithm=distill is the nearest: a teacher's log-probabilities of sampled responses.",
    "algorithm=opd": "Here it is algorithm=distill.",
    "cluster=slurm": "A job for it is written by slipstream launch slurm.",
    "data=hf": "Did you mean data=files data.path=hf:REPO:SPLIT?",
    "model=hf": "Did you mean model=checkpoint model.path=FOLDER?",
}
"""Presets of others whose names are spelt like none of ours, or like the wrong one -> what to say."""

REFUSED: Mapping[str, str] = dict.fromkeys(
    (f"rollout.sampling.{name}" for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")),
    "training refuses it, because engines return log-probabilities of what it leaves or makes of the distribution, and "
    "the trainer's are of the whole softmax(logits / temperature), so that ratios, importance weights and parity/k3 "
    "would compare two policies; for evaluations set rollout.eval.top_p or rollout.eval.top_k",
)
"""What others have, and no run can -> why, and what to do."""


def present_name(name: str) -> str | None:
    """What an option of an earlier version is now."""
    return next((ours for ours, before in EARLIER.items() if name in before.split()), None)


def counterpart(name: str) -> str | None:
    """Our words for another library's option, or for the end of its name where that has one meaning."""
    exact = [ours for ours, others in ELSEWHERE.items() if name in others.split()]
    similar = [
        ours
        for ours, others in ELSEWHERE.items()
        if any(other.endswith(f".{name}") or name.endswith(f".{other}") for other in others.split())
    ]
    return " or ".join(exact or (similar if len(similar) == 1 else [])) or None
