"""Promise of the decoder on CUDA:

the fast kernels compute what the plain ones do, forward and backward, on one GPU and over NCCL.
"""

import sys

import pytest
import torch
from cases.parallel_worker import Scenario, join_again, reference, run_ranks
from cases.tiny_configs import MIXED
from cases.tiny_models import logits_of, make_decoder, packed, probe_loss, relative_error, trainer_config
from torch.utils.checkpoint import checkpoint
from triton.runtime.jit import JITFunction

from slipstream.conf.schema import Activations, LoraConfig, TrainMode
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.model.attention.attend import flex_attention, padded_attention, sink_attention
from slipstream.trainer.model.attention.flash_attention import (
    AttentionCall,
    KeptAttention,
    cudnn_attention,
    varlen_attention,
)
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe import grouped
from slipstream.trainer.moe.grouped import GroupedBackend, grouped_gradient, grouped_product
from slipstream.trainer.weights.loading import CHUNK_ELEMENTS, fill_uniform, stream_key

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# bfloat16 keeps 8 bits: 2^-8 a rounding, a few dozen roundings in a row.
BF16_TOLERANCE = 0.05
ALL_EXPERTS = {**MIXED, "num_experts_per_tok": MIXED["num_experts"]}
"""Every token sees every expert, so that rounding cannot flip a choice of the router."""


def test_a_run_starts_from_the_same_adapters_as_on_a_cpu():
    """Bit by bit; also in a stack of several chunks, drawn within the declared scratch."""
    plain, mine = (dict(make_decoder(MIXED, nonzero_b=False, device=on).named_parameters()) for on in ("cpu", "cuda"))
    for name, parameter in plain.items():
        if "lora_" in name:
            assert torch.equal(mine[name].cpu(), parameter), name
    count, key = 5 * CHUNK_ELEMENTS["cuda"] // 2, stream_key(0, "a")
    wanted = torch.empty(count, dtype=torch.bfloat16)
    fill_uniform(wanted, bound=0.02, key=key, first_element=7)
    stack = torch.empty_like(wanted, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fill_uniform(stack, bound=0.02, key=key, first_element=7)
    assert torch.cuda.max_memory_allocated() - before <= 16 * CHUNK_ELEMENTS["cuda"]
    assert torch.equal(stack.cpu(), wanted)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("kv_heads", "key_dim", "value_dim"), [(1, 64, 64), (2, 64, 64), (8, 64, 64), (8, 192, 128)])
def test_varlen_attention_is_padded_attention(kv_heads, key_dim, value_dim, window):
    """Also when its forward runs again in a checkpoint, which gets the first one's results."""
    generator = torch.Generator("cuda").manual_seed(0)
    _, _, cu_seqlens = packed((70, 1, 130, 33))
    sequences = PackedSequences.from_cu_seqlens(cu_seqlens, 234, torch.device("cuda"))
    shapes = [(234, 8, key_dim), (234, kv_heads, key_dim), (234, kv_heads, value_dim)]
    inputs = [
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    weights = torch.randn(234, 8, value_dim, generator=generator, device="cuda")
    scale = 1.3 * key_dim**-0.5
    kept = KeptAttention()

    def run(q, k, v):
        return varlen_attention(q, k, v, AttentionCall(sequences, scale, window, kept=kept))

    fast = checkpoint(run, *inputs, use_reentrant=False)
    wide_q, wide_k, wide_v = wide
    plain = padded_attention(wide_q, wide_k, wide_v, AttentionCall(sequences, scale, window))
    assert relative_error(fast, plain) < 1e-2
    fast_grads = torch.autograd.grad((fast * weights).sum(), inputs)
    for mine, wanted in zip(fast_grads, torch.autograd.grad((plain * weights).sum(), wide), strict=True):
        assert relative_error(mine, wanted) < 2e-2
    assert kept.take() is None


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10), reason="needs Hopper"
)
@pytest.mark.parametrize("lengths", [(1024,), (1024, 1024), (1500, 1, 0, 2048)], ids=str)
@pytest.mark.parametrize(("kv_heads", "key_dim"), [(2, 128), (8, 128), (8, 192)])
def test_cudnn_attention_is_padded_attention(lengths, kv_heads, key_dim):
    """Also when its forward runs again in a checkpoint, which gets the first one's results."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    sequences = PackedSequences.from_cu_seqlens(starts, num_tokens, torch.device("cuda"))
    shapes = [(num_tokens, 8, key_dim), (num_tokens, kv_heads, key_dim), (num_tokens, kv_heads, 256)]
    q, k, kv = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes)
    inputs = [x.requires_grad_() for x in (q, k, kv[..., 128:])]  # values beside something else, as a latent's are
    wide = [x.detach().float().requires_grad_() for x in inputs]
    weights = torch.randn(num_tokens, 8, 128, generator=generator, device="cuda")
    wide_q, wide_k, wide_v = wide
    plain = padded_attention(wide_q, wide_k, wide_v, AttentionCall(sequences, 0.1))
    wanted = torch.autograd.grad((plain * weights).sum(), wide)
    kept = KeptAttention()

    def run(q, k, v):
        return cudnn_attention(q, k, v, AttentionCall(sequences, 0.1, kept=kept))

    fast = checkpoint(run, *inputs, use_reentrant=False)
    assert relative_error(fast, plain) < 1e-2
    for mine, other in zip(torch.autograd.grad((fast * weights).sum(), inputs), wanted, strict=True):
        assert relative_error(mine, other) < 2e-2
    assert kept.take() is None


@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_with_sinks_is_the_plain_one(window):
    generator = torch.Generator("cuda").manual_seed(0)
    _, _, cu_seqlens = packed((70, 1, 130, 33))
    sequences = PackedSequences.from_cu_seqlens(cu_seqlens, 234, torch.device("cuda"))
    shapes = [(234, 8, 64), (234, 2, 64), (234, 2, 64), (8,)]
    inputs = [
        torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes
    ]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    weights = torch.randn(shapes[0], generator=generator, device="cuda")
    (q, k, v, sinks), (wide_q, wide_k, wide_v, wide_sinks) = inputs, wide
    fast = flex_attention(q, k, v, AttentionCall(sequences, 0.125, window, sinks))
    plain = sink_attention(wide_q, wide_k, wide_v, AttentionCall(sequences, 0.125, window, wide_sinks))
    assert relative_error(fast, plain) < 1e-2
    fast_grads = torch.autograd.grad((fast * weights).sum(), inputs)
    for mine, wanted in zip(fast_grads, torch.autograd.grad((plain * weights).sum(), wide), strict=True):
        assert relative_error(mine, wanted) < 2e-2


@pytest.mark.parametrize("counts", [(3, 0, 200, 17), (0, 0, 0, 5), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("backend", [GroupedBackend.grouped_mm, GroupedBackend.triton])
def test_grouped_kernels_are_the_native_loop(monkeypatch, backend, counts):
    monkeypatch.setattr(grouped, "has_fast_grouped_mm", lambda *_: False)  # Triton's own, whatever their size
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(sum(counts), 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(sum(counts), 96, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 96, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    groups = RowGroups(torch.tensor(counts, device="cuda"), sum(counts))
    results = []
    for one in (backend, GroupedBackend.native):
        out, grad_x = (
            grouped_product(x, weight.transpose(1, 2), groups, one),
            grouped_product(grad, weight, groups, one),
        )
        results.append((out, grad_x, grouped_gradient(grad, x, groups, one)))
    for mine, wanted in zip(*results, strict=True):
        assert relative_error(mine, wanted) < 1e-2
    for expert, count in enumerate(counts):
        assert bool(results[0][2][expert].any()) is (count > 0)


@pytest.mark.parametrize("mode", [TrainMode.lora, TrainMode.full])
def test_bfloat16_decoder_is_near_the_float32_decoder_of_the_cpu(mode):
    config = trainer_config(mode, lora=LoraConfig(rank=8, alpha=16.0))
    batch = packed()
    on_gpu = (batch[0].cuda(), batch[1].cuda(), batch[2])
    gpu, cpu = make_decoder(ALL_EXPERTS, config, dtype=torch.bfloat16, device="cuda"), make_decoder(ALL_EXPERTS, config)
    assert gpu.backends["attention"] == "varlen"
    assert set(gpu.backends.values()) == {"varlen", "triton"}
    fast, plain = logits_of(gpu, on_gpu), logits_of(cpu, batch)
    assert relative_error(fast.cpu(), plain) < BF16_TOLERANCE
    probe_loss(fast, on_gpu[0]).backward()
    probe_loss(plain, batch[0]).backward()
    grads = [torch.cat([p.grad.flatten().cpu() for p in one.parameters() if p.grad is not None]) for one in (gpu, cpu)]
    assert relative_error(*grads) < 2 * BF16_TOLERANCE

    again = make_decoder(ALL_EXPERTS, config, dtype=torch.bfloat16, device="cuda")
    logits = logits_of(again, on_gpu)
    probe_loss(logits, on_gpu[0]).backward()
    assert torch.equal(logits, fast)  # forward repeats to the bit
    empty = logits_of(again, tuple(x.to("cuda") for x in packed(())))
    empty.sum().backward()


def test_another_number_of_tokens_compiles_nothing_anew():
    """Microbatches differ in their tokens from step to step."""
    decoder = make_decoder(ALL_EXPERTS, trainer_config(), dtype=torch.bfloat16, device="cuda")
    counts = []
    for lengths in ((256, 256), (256, 251), (240, 255)):
        batch = packed(lengths)
        on_gpu = (batch[0].cuda(), batch[1].cuda(), batch[2])
        probe_loss(logits_of(decoder, on_gpu), on_gpu[0]).backward()
        counts.append(compiled_kernels())
    assert counts[0]
    assert counts[1:] == [counts[0]] * 2


def compiled_kernels() -> dict[str, int]:
    """Per kernel of the trainer, the variants that this process has compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("slipstream.trainer.kernels.")]
    kernels = {f.__name__: f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    caches = {name: kernel.device_caches[torch.cuda.current_device()][0] for name, kernel in kernels.items()}
    return {name: len(cache) for name, cache in caches.items() if cache}


NCCL = [
    Scenario("lora_ep1", 1, ((0, 1), (2, 3))),
    Scenario("lora_ep2", 2, ((0, 1), (2, 3))),
    Scenario("one_rank_without_tokens_ep1", 1, ((), (0, 1, 2, 3))),
    Scenario("one_rank_without_tokens_ep2", 2, ((), (0, 1, 2, 3))),
    Scenario("full_ep2", 2, ((0, 1), (2, 3)), mode=TrainMode.full),
    Scenario("lora_ep1_bfloat16", 1, ((0, 1), (2, 3)), dtype=torch.bfloat16, hf_config=ALL_EXPERTS),
    Scenario("lora_ep2_bfloat16", 2, ((0, 1), (2, 3)), dtype=torch.bfloat16, hf_config=ALL_EXPERTS),
    Scenario("no_tokens_at_all_bfloat16", 2, ((), ()), lengths=(), dtype=torch.bfloat16, hf_config=ALL_EXPERTS),
    Scenario("whole_lora_ep2", 2, ((0, 1), (2, 3)), is_whole=True),
    Scenario("whole_lora_ep1", 1, ((0, 1), (2, 3)), is_whole=True),
    Scenario("whole_full_ep2", 2, ((0, 1), (2, 3)), mode=TrainMode.full, is_whole=True),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_ranks_over_nccl_match_one_on_the_cpu(tmp_path):
    ranks = run_ranks(2, tmp_path, NCCL, [], device_type="cuda")
    for scenario in NCCL:
        if not scenario.lengths:
            assert all(not g.any() for results in ranks for g in results[scenario.name]["grads"].values())
            continue
        expected = reference(scenario)
        tolerance = 1e-4 if scenario.dtype is torch.float32 else 2 * BF16_TOLERANCE
        logits = torch.cat([results[scenario.name]["logits"] for results in ranks])
        assert relative_error(logits, expected["logits"]) < tolerance, scenario.name
        for results in ranks:
            grads = results[scenario.name]["grads"]
            both = [torch.cat([one[name].flatten() for name in sorted(grads)]) for one in (grads, expected["grads"])]
            assert relative_error(*both) < tolerance, scenario.name


def test_embeddings_in_host_memory_change_no_bit():
    batch = tuple(x.cuda() for x in packed())
    results = []
    for is_on_host in (False, True):
        decoder = make_decoder(MIXED, trainer_config(embedding_on_host=is_on_host), device="cuda", dtype=torch.bfloat16)
        table = decoder.model.embed_tokens.weight
        assert table.is_cuda is not is_on_host and table.is_pinned() is is_on_host
        logits = logits_of(decoder, batch)
        probe_loss(logits, batch[0]).backward()
        results.append([logits, *(p.grad for p in decoder.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("long", [False, True], ids=["varlen", "cudnn"])
def test_activations_in_host_memory_take_less_memory_and_change_nothing(long):
    """Three microbatches each: the second and third write into host memory that the one before has read. Values are the
    same bits, and gradients, too, where kernels add in a fixed order. cuDNN's attention does not: two runs with nothing
    in host memory differ by up to 1e-2.
    """
    lengths = (4096, 4096) if long else (700, 3000, 1500)
    config = {**MIXED, "num_hidden_layers": 12, "hidden_size": 512, "head_dim": 64}
    results, peaks = [], []
    for options in ({}, {"activations": Activations.host}, {"activations": Activations.host, "gate_up_kept": 0.5}):
        decoder = make_decoder(config, trainer_config(**options), device="cuda", dtype=torch.bfloat16)
        for seed in (0, 1, 2):
            batch = packed(lengths, seed=seed)
            batch = batch[0].cuda(), batch[1].cuda(), batch[2]
            torch.cuda.reset_peak_memory_stats()
            hidden = decoder(*batch)
            hidden.float().square().mean().backward()
            results.append([hidden.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)])
            decoder.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
    for place, other in enumerate(results[3:]):
        one = results[place % 3]
        assert torch.equal(one[0], other[0])
        for gradient, expected in zip(one[1:], other[1:], strict=True):
            assert relative_error(gradient, expected) < 3e-2 if long else torch.equal(gradient, expected)
    assert peaks[1] < peaks[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_process_may_join_a_second_time(tmp_path):
    """Where NCCL's default group is split, the second join of a process ends in a SIGSEGV (docs/LOG.md)."""
    torch.multiprocessing.spawn(join_again, args=(2, str(tmp_path), [2, 1, 2], "cuda"), nprocs=2)
