"""Options that contradict each other are refused, with both named and a cure."""

import re

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import check_model_reads_overrides, load_run_config

BITWISE = "parity=bitwise cluster.device=cuda trainer.num_ranks=1 trainer.ep_size=1"
DISTILL = "algorithm=distill algorithm.teacher.base_url=http://127.0.0.1:8000/v1 algorithm.teacher.model=big"
CUT_EXPERTS = ["model.hf_config.moe_intermediate_size=62", "rollout.tp_size=4"]
# fmt: off
CASES = [
    ("trainer=full trainer.num_ranks=1 trainer.ep_size=1 trainer.numerics.match=merged", "trainer.numerics.match=merged needs trainer.mode=lora"),
    ("parity=bitwise trainer.num_ranks=1 trainer.ep_size=1", "parity=bitwise.*contradicts cluster.device=cpu.*parity=standard"),
    ("cluster.share_gpu=true cluster.device=cuda", "cluster.share_gpu=true contradicts trainer.num_ranks=2.*set it to 1"),
    ("experiment=quickstart_one_gpu rollout.tp_size=2", "cluster.share_gpu=true contradicts rollout.tp_size=2.*set it to 1"),
    ("experiment=quickstart_one_gpu rollout.kv_cache_bytes=null", "cluster.share_gpu=true contradicts rollout.kv_cache_bytes=null.*set the cache's size"),
    ("cluster.share_gpu=true cluster.device=cpu", "cluster.share_gpu has no effect with cluster.device=cpu"),
    ("rollout.num_workers=3..1", "rollout.num_workers=3..1: the first number is the fewest; write 1..3"),
    ("rollout.num_workers=0..2", "rollout.num_workers=0..2: a run needs at least one rollout worker; write 1..2"),
    ("rollout.num_workers=-1", "rollout.num_workers must be >= 1, got -1"),
    *(
        ([f"rollout.num_workers={given}"], r"must be an integer or a range MIN..MAX, such as 2 or 1..4, got .*")
        for given in ("many", "1..x", "..3", "1..2..3")
    ),
    ("experiment=quickstart_gpu rollout.num_workers=2..3 rollout.workers_per_gpu=2", "must divide"),
    *(
        ([f"rollout.notice={given}", "cluster.ray_address=10.0.0.1:6379"], "notice must be a whole path.*, or a URL")
        for given in ("taken", "ftp://host/x", "http://", "http:/latest")
    ),
    ("rollout.notice=/run/taken", "rollout.notice has no effect with cluster.ray_address=null: the whole run is on"),
    ("algorithm=sft rollout.notice=/run/taken", "rollout.notice has no effect with"),
    ("rollout.workers_per_gpu=0", "rollout.workers_per_gpu must be >= 1, got 0"),
    ("experiment=quickstart_gpu rollout.workers_per_gpu=3", "rollout.workers_per_gpu=3 must divide rollout.num_workers=1.*set rollout.num_workers=3"),
    ("experiment=quickstart_gpu rollout.num_workers=2 rollout.workers_per_gpu=2 rollout.tp_size=2", "rollout.workers_per_gpu=2 contradicts rollout.tp_size=2.*set one of the two to 1"),
    ("rollout.workers_per_gpu=2", "rollout.workers_per_gpu has no effect with cluster.device=cpu"),
    ("experiment=quickstart_one_gpu rollout.num_workers=2 rollout.workers_per_gpu=2", "rollout.workers_per_gpu has no effect with cluster.share_gpu=true: all engines share one GPU; remove it"),
    ("rollout.engine_options.max_num_seqs=8", "engine_options.max_num_seqs is what rollout.max_num_seqs is for"),
    (["rollout.engine_options={cpu_offload_gb: 4}"], "cpu_offload_gb cannot be set: a publish writes into weights"),
    ("rollout.engine_options.max_lora_rank=8", "max_lora_rank is what weight_sync.mode=adapter is for"),
    ("rollout.engine_options.kv_cache_dtype=fp8", "kv_cache_dtype cannot be set: log-probabilities must be those"),
    ("rollout.engine_options.compilation_config=3", "compilation_config must be a mapping, got 3"),
    (BITWISE + " rollout.engine_options.block_size=32", "parity=bitwise.*contradicts rollout.engine_options"),
    ("parity=bitwise", "trainer.numerics.match=bitwise needs trainer.num_ranks=1, got 2"),
    (BITWISE + " rollout.tp_size=4", "parity=bitwise.*contradicts rollout.tp_size=4.*set it to 1 or 2"),
    (BITWISE + " rollout.tp_size=2 weight_sync.mode=adapter", "parity=bitwise.*contradicts rollout.tp_size=2 with weight_sync.mode=adapter; set it to 1"),
    (BITWISE + " rollout.tp_size=2 model=tiny_qwen3_moe model.dtype=bfloat16", "parity=bitwise.*does not know rollout.tp_size=2 for models with experts"),
    (BITWISE + " rollout.sampling.temperature=0.7", "parity=bitwise.*temperature=0.7.*set it to 1"),
    ("rollout.eval.top_p=0", r"rollout.eval.top_p must lie in \(0, 1\], got 0"),
    ("rollout.eval.seed=-1", "rollout.eval.seed must be >= 0 or null, got -1"),
    ("rollout.eval.temperature=0 rollout.eval.top_k=5", "rollout.eval.top_k has no effect with.*likeliest token"),
    ("data.eval_path=null rollout.eval.seed=5", "rollout.eval.seed has no effect with data.eval_path=null"),
    ("run.keep_best=eval/reward run.eval_beside=true", "run.keep_best=eval/reward contradicts run.eval_beside=true"),
    ("data.eval_path=null run.keep_best=eval/reward", "run.keep_best has no effect with data.eval_path=null"),
    ("data.eval_sets.hard=hard.jsonl", "data.eval_path=.* and data.eval_sets .hard. are both set; give all"),
    ("data.eval_path=null data.eval_sets.a-b=x.jsonl", "data.eval_sets.a-b: the name of a set is part of metrics"),
    ("rollout.sampling.seed=-1", "rollout.sampling.seed must be >= 0 or null, got -1"),
    ('rollout.sampling.stop=[""]', "rollout.sampling.stop has an empty text"),
    (r'rollout.sampling.stop=["\n"]', "rollout.sampling.stop has .*a backslash and a letter.*a line break write"),
    ("rollout.sampling.stop_token_ids=[-1]", "rollout.sampling.stop_token_ids must be >= 0, got -1"),
    ("rollout.sampling.stop=[a] weight_sync.mode=adapter weight_sync.pause_mode=abort", "rollout.sampling.stop contradicts weight_sync.pause_mode=abort.*set it to wait.*stop_token_ids instead"),
    ("rollout.sampling.stop=[a] parity.replay_routing=true cluster.device=cuda", "rollout.sampling.stop contradicts parity.replay_routing=true.*set it to false"),
    (BITWISE + " model.dtype=float32", "parity=bitwise.*model.dtype=float32; set it to bfloat16"),
    (BITWISE + " model.dtype=bfloat16 parity.replay_routing=true", "parity=bitwise.*parity.replay_routing=true"),
    (BITWISE + " model.dtype=bfloat16 model.engine_format=block_fp8", "parity=bitwise.*engine_format=block_fp8"),
    (BITWISE + " model=tiny_deepseek_v3 model.dtype=bfloat16", "parity=bitwise.*does not know model_type=deepseek_v3.*qwen3, qwen3_moe"),
    (BITWISE + " model.dtype=bfloat16 +model.hf_config.rope_scaling={rope_type:yarn,factor:2.0}", "parity=bitwise.*positions scaled by yarn"),
    (BITWISE + " model.dtype=bfloat16 model.hf_config.head_dim=64", "parity=bitwise.*head_dim=64: only at 128, 192, 256 .*parity=standard"),
    (BITWISE + " model.dtype=bfloat16 trainer.activations=keep", "trainer.activations has no effect with trainer.numerics.match=bitwise"),
    ("trainer.activations=host trainer.numerics.match=merged trainer.num_ranks=1 trainer.ep_size=1", "trainer.activations=host contradicts trainer.numerics.match=merged"),
    *(
        (f"algorithm=sft trainer.num_ranks=1 trainer.ep_size=1 {one}=bitwise", "contradicts algorithm=sft, which has no engine .*set trainer.numerics.match=engine")
        for one in ("trainer.numerics.match", "parity")
    ),
    ("trainer.num_ranks=16 trainer.ep_size=16 algorithm.groups_per_step=16", "trainer.ep_size=16 is more than the model's 8 experts.*can be 1, 2, 4, 8"),
    ("model=tiny_qwen3", "trainer.ep_size=2 needs a mixture of experts.*qwen3.*trainer.ep_size=1"),
    ("trainer.num_ranks=3", "trainer.ep_size must divide trainer.num_ranks.*2.*3; it can be 1, 3"),
    ("trainer.cp_size=3", "trainer.cp_size must divide trainer.num_ranks.*3.*2; it can be 1, 2"),
    ("rollout.tp_size=3", "rollout.tp_size=3 does not divide the model's 4 attention heads.*1, 2, 4"),
    ("data.max_prompt_tokens=64", "data.max_prompt_tokens=64 plus rollout.sampling.max_tokens=.*rollout.max_model_len=64"),
    ("rollout.max_num_batched_tokens=64", "rollout.max_num_batched_tokens must be >= rollout.max_num_seqs.*got 64 and 128"),
    ("rollout.max_model_len=1024", "rollout.max_model_len=1024 is more than the model's max_position_embeddings=512"),
    ("weight_sync.transport=nvlink", "weight_sync.transport=nvlink contradicts cluster.device=cpu"),
    ("rollout.enable_expert_parallel=true", "rollout.enable_expert_parallel=true contradicts cluster.device=cpu"),
    ("trainer=full trainer.lora.rank=8", "trainer.lora.rank has no effect with trainer.mode=full"),
    ("model.hf_config.head_dim=48", "head_dim=48 has no attention kernel in the CPU engine.*cluster.device=cuda"),
    ("model=tiny_deepseek_v3 model.hf_config.kv_lora_rank=256", "latent attention is made for kv_lora_rank=512.*has 256 and 64.*cluster.device=cuda"),
    ("trainer.lora.targets=[mlp]", r"leaves nothing to adapt.*trainer.lora.targets=\[experts\]"),
    ("trainer.lora.targets=[q_proj,gate_proj]", r"this model has no gate_proj; it has q_proj, k_proj, v_proj, o_proj, and routed experts, .*: experts$"),
    ("model=tiny_deepseek_v3 trainer.lora.targets=[k_proj]", "this model has no k_proj; it has .*kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter trainer.lora.targets=[q_proj,v_proj]", "engines have one slot for q_proj, k_proj, v_proj; name all or none"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter trainer.lora.targets=[up_proj]", "engines have one slot for gate_proj, up_proj; name all or none"),
    ("weight_sync.mode=adapter trainer=full", "weight_sync.mode=adapter contradicts trainer.mode=full"),
    ("weight_sync.mode=adapter trainer.lora.rank=600", "rank 512 at most, got trainer.lora.rank=600"),
    ("model=minimax_m2 cluster.device=cpu", "CPU engine does not serve model_type=minimax_m2: its router takes.*cluster.device=cuda"),
    ("model=glm_5 cluster.device=cpu", "CPU engine does not serve model_type=glm_moe_dsa: it has no attention to keys that an indexer"),
    ("cluster.device=cuda weight_sync.mode=adapter model=minimax_m2", "slots of minimax_m2's experts have no names.*trainer.lora.targets without experts"),
    ("cluster.device=cuda weight_sync.mode=adapter model=glm_4_7_flash trainer.lora.targets=[attention,mlp]", "latent attention of model_type=glm4_moe_lite has no slots.*trainer.lora.targets without attention"),
    ("cluster.device=cuda weight_sync.mode=adapter model=qwen3_next_80b_a3b", "linear attention of model_type=qwen3_next has no slots.*trainer.lora.targets without attention"),
    ("model=qwen3_next_80b_a3b cluster.device=cpu model.dtype=float32", "model.dtype=float32: the CPU engine's linear attention computes in bfloat16 alone"),
    ("model=qwen3_next_80b_a3b model.hf_config.linear_key_head_dim=64", "linear attention is made for heads of 128, and linear_key_head_dim is 64"),
    ("model=qwen3_next_80b_a3b cluster.device=cuda rollout.tp_size=8 model.hf_config.linear_num_key_heads=4", "rollout.tp_size=8 does not divide the linear attention's linear_num_key_heads=4; it can be 1, 2, 4"),
    ("cluster.device=cuda weight_sync.mode=adapter model.hf_config.model_type=mixtral", "slots of mixtral's experts have no names.*trainer.lora.targets without experts"),
    ("cluster.device=cuda weight_sync.mode=adapter trainer.lora.attention_rank=200", "adapters of experts up to rank 128.*which is 256 here.*trainer.lora.targets without experts"),
    ("experiment=kimi_k2_thinking_lora weight_sync.mode=merged", "INT4 engines accept adapter mode only"),
    ("trainer.lora.targets=[qproj]", "trainer.lora.targets has no 'qproj'. Did you mean q_proj.$"),
    ("cluster.device=cuda weight_sync.mode=adapter trainer.lora.expert_rank=16 trainer.lora.rank=129", "adapters of experts up to rank 128, and .*which is 256 here"),
    ("trainer.lora.rank=513", "routed experts take adapters of rank 512 at most, got 513.*expert_rank=512 or lower"),
    ("weight_sync.mode=adapter", "CPU engine serves no adapters in a model with experts.*model=tiny_qwen3"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter weight_sync.pause_mode=keep_kv", "weight_sync.pause_mode=keep_kv needs weight_sync.mode=merged"),
    ("weight_sync.delta_bytes=-1", "weight_sync.delta_bytes must be 0 or >= 64, got -1"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter weight_sync.delta_bytes=1000", "weight_sync.delta_bytes=1000 needs weight_sync.mode=merged; 0 sends every byte"),
    ("model.dtype=float32 weight_sync.delta_bytes=1000", "delta_bytes=1000.*contradicts model.dtype=float32"),
    ("weight_sync.remote_merge=gpu", "remote_merge=gpu.*contradicts cluster.device=cpu.*remote_merge=none"),
    ("cluster.device=cuda model.dtype=bfloat16 model.engine_format=block_fp8 weight_sync.remote_merge=gpu", "remote_merge=gpu.*contradicts block-FP8 engines"),
    ("weight_sync.remote_merge=host weight_sync.delta_bytes=1000", "delta_bytes=1000 and weight_sync.remote_merge=host are two ways"),
    ("trainer.mode=full weight_sync.remote_merge=host", "weight_sync.remote_merge has no effect with trainer.mode=full"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter weight_sync.remote_merge=host", "weight_sync.remote_merge has no effect with weight_sync.mode=adapter"),
    ("model=tiny_qwen3 trainer.ep_size=1 weight_sync.mode=adapter weight_sync.relay=node", "weight_sync.relay=node contradicts weight_sync.mode=adapter.*weight_sync.mode=merged"),
    ("rollout.num_workers=1 weight_sync.relay=node", "weight_sync.relay has no effect with rollout.num_workers=1"),
    ("algorithm=sft rollout.num_workers=4", "rollout.num_workers has no effect with algorithm=sft"),
    ("algorithm=sft algorithm.group_size=4", "algorithm.group_size has no effect with algorithm=sft"),
    ("algorithm=dpo rollout.num_workers=4", "rollout.num_workers has no effect with algorithm=dpo"),
    ("algorithm=dpo reward=math", "reward has no effect with algorithm=dpo"),
    ("algorithm=sft reward.parts.a.kind=math", "reward.parts.a.kind has no effect with algorithm=sft"),
    ("algorithm=dpo algorithm.kl_coef=0.1", "algorithm.kl_coef has no effect with algorithm=dpo"),
    ("algorithm=dpo algorithm.normalization=sequence", "algorithm.normalization has no effect with algorithm=dpo"),
    ("algorithm=sft algorithm.dpo_beta=0.2", "dpo_beta has no effect with algorithm.objective=sft; .*algorithm=dpo"),
    ("algorithm.dpo_beta=0.2", "dpo_beta has no effect with algorithm.objective=policy"),
    ("algorithm=dpo algorithm.dpo_beta=0", "algorithm.dpo_beta must be > 0, got 0"),
    ("algorithm=dpo algorithm.dpo_beta=inf", "algorithm.dpo_beta must be finite, got inf"),
    ("algorithm=dpo data=files", "data.path is required: .*of pairs"),
    ("data.max_sequence_tokens=9", "data.max_sequence_tokens has no effect.*choose algorithm=sft"),
    ("data.path=null", "data.path is required.*data=letters"),
    ("model.tokenizer=null", "model.tokenizer is required.*characters"),
    ("reward=exact_match reward.pattern=x", "reward.pattern has no effect with reward.kind=exact_match"),
    ("reward=exact_match reward.keep_special_tokens=true", "reward.keep_special_tokens=true contradicts reward.kind=exact_match.*choose reward=regex"),
    ("reward=math +reward.judge.extra.effort=low", "reward.judge.extra.effort has no effect with reward.kind=math"),
    ("cluster=attached cluster.dashboard=true", "cluster.dashboard has no effect with cluster.ray_address=auto"),
    ("cluster.device=cuda rollout.enable_expert_parallel=true", "rollout.enable_expert_parallel has no effect with rollout.tp_size=1.*set rollout.tp_size"),
    ("cluster.device=cuda model.engine_format=block_fp8 model.dtype=float32", "model.dtype=float32 contradicts block-FP8 engines.*set model.dtype=bfloat16"),
    ("data.sources=[a.jsonl,b.jsonl]", "data.path=pkg://letters_train.jsonl and data.sources=.*choose data=files"),
    ("data=files data.sources=[a.jsonl,a.jsonl]", "data.sources names a source twice.*larger weight"),
    ("data=files data.sources=[a.jsonl,b.jsonl] data.weights=[1]", "data.weights must have one number for each of data.sources, got 1 for 2"),
    ("data=files data.sources=[a.jsonl] data.weights=[0]", "data.weights must be > 0, got 0"),
    ("data.weights=[1]", "data.weights has no effect with data.sources=.*give data.sources"),
    ("data.columns.answer=", "data.columns.answer must name a column, got nothing"),
    ("data.order=easy", "data.order must be one of shuffled, given, middling, got 'easy'"),
    ("data.order=middling data.stream=true", "data.order=middling contradicts data.stream=true.*set data.stream=false"),
    ("algorithm=sft data.order=middling", "data.order=middling contradicts algorithm=sft"),
    ("rollout.gpu_memory_utilization=0.5", "rollout.gpu_memory_utilization has no effect with cluster.device=cpu"),
    ("data.eval_path=null run.eval_samples_per_prompt=4", "run.eval_samples_per_prompt has no effect with data.eval_path=null"),
    ("model.init=checkpoint", "model.path is required when model.init=checkpoint"),
    ("model=tiny_qwen3 model.hf_config.initializer_range=0", "model.hf_config.initializer_range must be > 0, got 0"),
    ("algorithm.ratio_baseline=rollout", "algorithm.correction=none"),
    ("algorithm.loss=ppo", "algorithm.loss must be one of clip, gspo, cispo, sapo, FILE.py:function .*, got 'ppo'"),
    ("algorithm.advantage=std", "algorithm.advantage must be one of group_std, .*, got 'std'"),
    ("algorithm.loss=gspo", "algorithm.loss has no effect with algorithm.ratio_baseline=trainer.*minibatches_per_step"),
    ("algorithm=gspo algorithm.dual_clip=3", "algorithm.dual_clip has no effect with algorithm.loss=gspo"),
    ("algorithm=sapo algorithm.clip_high=0.3", "algorithm.clip_high has no effect with algorithm.loss=sapo"),
    ("algorithm=dapo algorithm.dual_clip=0.5", "algorithm.dual_clip must be > 1 or null, got 0.5"),
    ("algorithm.kl_in=reward", "algorithm.kl_in has no effect with algorithm.kl_coef=0"),
    ("algorithm.minibatches_per_step=17", "minibatches_per_step must be <= algorithm.groups_per_step=16.*got 17"),
    ("algorithm.epochs_per_step=0", "algorithm.epochs_per_step must be >= 1, got 0"),
    ("algorithm.entropy_coef=inf", "algorithm.entropy_coef must be finite, got inf"),
    ("algorithm.kl_coef=nan", "algorithm.kl_coef must be >= 0, got nan"),
    ("trainer.optim.max_grad_norm=inf", "trainer.optim.max_grad_norm must be finite, got inf"),
    ("algorithm.correction_max=0.5", "algorithm.correction_max must be >= 1, got 0.5"),
    ("algorithm.correction=mis algorithm.correction_min=2", r"correction_min must lie in \[0, 1\], got 2"),
    ("algorithm.correction=none algorithm.correction_max=3", "no effect with algorithm.correction=none"),
    ("algorithm.correction_min=0.5", "no effect with algorithm.correction=tis, which cuts weights above alone"),
    ("parity.stop_k3=0.01", "parity.stop_k3=0.01 is below parity.warn_k3=0.05.*raise parity.stop_k3"),
    ("parity.warn_k3=-1", "parity.warn_k3 must be >= 0, got -1"),
    ("parity.stop_k3=inf", "parity.stop_k3 must be finite, got inf"),
    ("parity.replay_routing=true", "contradicts cluster.device=cpu.*does not record.*cluster.device=cuda"),
    ("model=tiny_qwen3 trainer.ep_size=1 parity.replay_routing=true", "parity.replay_routing=true needs a mixture of experts.*qwen3.*parity.replay_routing=false"),
    ("algorithm=sft rollout.tp_size=2 run.seed=1 weight_sync.mode=adapter", "rollout.tp_size, weight_sync.mode have no effect with algorithm=sft.*; remove them, or"),
    ("algorithm=sft parity.replay_routing=true", "parity.replay_routing has no effect with algorithm=sft"),
    ("algorithm=sft parity.warn_k3=0.1", "parity.warn_k3 has no effect with algorithm=sft"),
    ("algorithm.clip_high=0.3", "algorithm.clip_high has no effect with algorithm.ratio_baseline=trainer.*set algorithm.ratio_baseline=rollout"),
    ("model=tiny_qwen3 trainer.ep_size=1 trainer.lora.expert_rank=4", "trainer.lora.expert_rank has no effect with model_type=qwen3, which has no experts"),
    ("model=tiny_qwen3 trainer.ep_size=1 trainer=full trainer.train_router=true", "trainer.train_router has no effect with model_type=qwen3"),
    ("trainer.lora.targets=[mlp,experts] trainer.lora.attention_rank=4", "trainer.lora.attention_rank has no effect with trainer.lora.targets="),
    ("trainer.lora.targets=[attention,mlp] trainer.lora.expert_rank=4", "trainer.lora.expert_rank has no effect with trainer.lora.targets="),
    ("algorithm.mask_truncated=true", "algorithm.mask_truncated=true contradicts rollout.sampling.stop_at_eos=false"),
    ("algorithm=sft algorithm.normalization=constant", "algorithm.normalization=constant divides by rollout"),
    ("algorithm=sft algorithm.mask_truncated=true", "algorithm.mask_truncated has no effect with algorithm=sft"),
    ("run.seed=-1", "run.seed must be >= 0, got -1"),
    ("run.seed=9223372036854775808", r"run.seed must be < 2\*\*63, got 9223372036854775808"),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens must be >= 1 or null, got 0"),
    ("rollout.kv_cache_bytes=0", "rollout.kv_cache_bytes must be > 0 or null, got 0"),
    ("cluster.start_timeout_s=0", r"cluster.start_timeout_s must be > 0, got 0"),
    ("trainer.train_router=true", "trainer.train_router=true needs trainer.mode=full"),
    ("trainer.lora.targets=[attention,heads]", r"trainer.lora.targets must be some of attention, mlp, experts, q_proj, k_proj, .*, down_proj, got \['attention', 'heads'\]"),
    ("trainer.gate_up_kept=1.5", "trainer.gate_up_kept is a share of the expert layers, from 0 to 1, got 1.5"),
    ("trainer.gate_up_kept=nan", "trainer.gate_up_kept is a share of the expert layers, from 0 to 1, got nan"),
    ("trainer.gate_up_kept=0.5 trainer.activations=keep", "trainer.gate_up_kept has no effect with trainer.activations=keep, with which every layer keeps"),
    ("model=tiny_qwen3 trainer.ep_size=1 trainer.gate_up_kept=0.5 trainer.activations=recompute", "trainer.gate_up_kept has no effect with model_type=qwen3, which has no experts"),
    ("trainer.embedding_on_host=true trainer.num_ranks=2", "trainer.embedding_on_host=true needs"),
    ("trainer.optim.state=host trainer.lora.dtype=bfloat16", "trainer.optim.state=host needs trainer.lora.dtype=float32"),
    ("trainer.embedding_on_host=true trainer.mode=full", "trainer.embedding_on_host=true needs"),
    ("algorithm.group_size=1", "algorithm.group_size must be >= 2, got 1"),
    (DISTILL + " algorithm.group_size=0", "algorithm.group_size must be >= 1, got 0"),
    ("algorithm=distill", "algorithm.distill_coef=1 needs a teacher: give algorithm.teacher.base_url and .* got ''"),
    (DISTILL + " algorithm.teacher.model=''", "algorithm.distill_coef=1 needs a teacher: .*/v1' and ''"),
    (DISTILL + " algorithm.distill_coef=-1", "algorithm.distill_coef must be >= 0, got -1"),
    (DISTILL + " algorithm.distill_coef=inf", "algorithm.distill_coef must be finite, got inf"),
    (DISTILL + " algorithm.teacher.base_url=http://me:fish@box:8000/v1", "^algorithm.teacher.base_url holds a password, [^@]*$"),
    ("reward=judge reward.judge.base_url=https://:fish@box/v1", "^reward.judge.base_url holds a password, [^@]*$"),
    ("cluster=attached rollout.notice=http://me:fish@host/taken", "^rollout.notice holds a password, [^@]*$"),
    (DISTILL + " algorithm.teacher.base_url=box:8000", "must be the address of an OpenAI endpoint.* got 'box:8000'"),
    (DISTILL + " algorithm.teacher.timeout_s=0", "algorithm.teacher.timeout_s must be > 0, got 0"),
    ("algorithm.advantage=none", "algorithm.advantage=none leaves nothing to learn from: choose algorithm=distill"),
    (DISTILL + " algorithm.drop_zero_variance_groups=true", "contradicts algorithm.drop_zero_variance_groups=true"),
    (DISTILL + " algorithm.kl_coef=1 algorithm.kl_in=reward", "contradicts algorithm.kl_in=reward"),
    ("algorithm.teacher.timeout_s=2", "algorithm.teacher.timeout_s has no effect with algorithm.distill_coef=0"),
    ("algorithm=sft algorithm.teacher.model=big", "algorithm.teacher.model has no effect with algorithm=sft"),
    ("algorithm=sft algorithm.distill_coef=1", "algorithm.distill_coef"),
    *(
        (f"algorithm.correction={one} parity.mask_log_ratio=1", f"mask_log_ratio=1 contradicts algorithm.correction={one}")
        for one in ("mis", "icepop", "sequence_mis", "geometric_mis")
    ),
    ("model=tiny_qwen3 trainer.ep_size=1 cluster.device=cuda rollout.tp_size=2 rollout.enable_expert_parallel=true", "rollout.enable_expert_parallel=true needs a mixture of experts, and model_type=qwen3 has none"),
    ("model.hf_config.moe_intermediate_size=62 rollout.tp_size=4", "tp_size=4 does not divide the routed experts' moe_intermediate_size=62; it can be 1, 2$"),
    ("model.hf_config.moe_intermediate_size=62 rollout.tp_size=4 cluster.device=cuda", "it can be 1, 2; with expert parallelism"),
    ("reward=none", "reward.kind=none contradicts algorithm.advantage=group_std.*choose algorithm=distill"),
]
# fmt: on


@pytest.mark.parametrize(("words", "message"), CASES, ids=[str(case[0]).split()[-1] for case in CASES])
def test_contradictions_are_refused(words: str | list[str], message: str) -> None:
    """`words`: a list where one of them has a blank."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(["experiment=quickstart", *(words.split() if isinstance(words, str) else words)])
    assert re.search(message, str(caught.value)), str(caught.value)


def test_options_of_a_checkpoint_are_judged_once_its_config_is_read() -> None:
    words = ["model=checkpoint", "model.path=/x", "data=letters", "trainer.lora.expert_rank=8"]
    config = load_run_config(words)
    check_model_reads_overrides(config, words, {"model_type": "kimi_k2", "kv_lora_rank": 512, "n_routed_experts": 8})
    with pytest.raises(ConfigError, match=r"trainer\.lora\.expert_rank has no effect"):
        check_model_reads_overrides(config, words, {"model_type": "deepseek_v3", "kv_lora_rank": 512})


@pytest.mark.parametrize(
    "words",
    [
        ["trainer=full"],
        ["trainer=full", "algorithm.kl_coef=0.1"],  # the ranks keep their first shards as the reference
        ["trainer.max_microbatch_tokens=1"],  # a longer sample gets a microbatch of its own
        ["data.eval_path=null"],
        ["algorithm=dapo", "algorithm.clip_high=0.3"],
        ["algorithm.max_staleness_steps=0"],
        ["trainer.num_ranks=4", "trainer.ep_size=2"],
        ["trainer.num_ranks=2", "algorithm.groups_per_step=3", "algorithm.group_size=5"],  # packing goes by cost
        ["trainer.num_ranks=4", "algorithm.groups_per_step=1", "algorithm.group_size=2"],  # two ranks get nothing
        ["rollout.tp_size=2"],
        ["model=tiny_qwen3", "trainer.ep_size=1", "trainer.lora.targets=[mlp,experts]"],
        ["model=tiny_deepseek_v3"],
        ["model=tiny_deepseek_v3", "trainer.numerics.match=transformers", "trainer.lora.expert_rank=4"],
        ["rollout.sampling.max_tokens=3"],
        ["algorithm.mask_truncated=true", "rollout.sampling.stop_at_eos=true"],
        ["algorithm.mask_truncated=true", "rollout.sampling.stop=[a]"],
        ["rollout.eval.top_p=0.9", "rollout.eval.top_k=20", "rollout.eval.seed=1"],
        f"{BITWISE} model.dtype=bfloat16 model.hf_config.head_dim=128".split(),
        f"{BITWISE} model.dtype=bfloat16 model.hf_config.head_dim=128 weight_sync.mode=adapter".split(),
        DISTILL.split(),
        [*DISTILL.split(), "reward=none", "algorithm.group_size=1", "algorithm.teacher.api_key_env=TEACHER_KEY"],
        [*DISTILL.split(), "algorithm=dapo", "algorithm.distill_coef=0.1"],
        ["algorithm.epochs_per_step=2", "algorithm.loss=gspo", "algorithm.clip_low=0.1"],
        ["model=tiny_deepseek_v3", "trainer.lora.targets=[mlp]"],  # the dense ones
        ["cluster.device=cuda", "weight_sync.mode=adapter", "trainer.lora.expert_rank=16", "trainer.lora.rank=128"],
        ["cluster.device=cuda", "trainer.lora.expert_rank=16", "trainer.lora.rank=129"],
        ["cluster.device=cuda", *CUT_EXPERTS, "rollout.enable_expert_parallel=true"],  # ranks hold experts whole
        *([f"algorithm.correction={one}", "parity.mask_log_ratio=1"] for one in ("none", "tis", "sequence_tis")),
    ],
)
def test_sensible_combinations_are_allowed(words: list[str]) -> None:
    load_run_config(["experiment=quickstart", *words])
