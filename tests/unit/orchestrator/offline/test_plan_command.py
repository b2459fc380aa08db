"""`slipstream plan`: figures that add up, files that others can read, mistakes with a cure, and nothing started.

The engine's layout comes from a stand-in here (it takes a vLLM to record one: tests/contract/test_recorder_vllm.py).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.command import run_python

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import DType, LoraConfig, RolloutConfig
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, resolve_hf_config
from slipstream.orchestrator.offline import estimate
from slipstream.orchestrator.offline.estimate import plan_run
from slipstream.orchestrator.offline.estimate_report import as_plain, print_report
from slipstream.orchestrator.offline.hardware import Hardware
from slipstream.orchestrator.offline.modes import adapter_slot
from slipstream.orchestrator.offline.plan_report import DeltaChoice, PlanReport
from slipstream.rollout.errors import EngineError
from slipstream.trainer.weights.adapter_names import adapter_tensors
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region
from slipstream.weight_sync.prediction.links import LinkRates

QUICK = ["experiment=quickstart"]


def row_layouts(request: Any, *_: Any) -> tuple[DestLayout, ...]:
    """An engine whose parameters are the checkpoint's tensors, cut by rows where the rows divide."""
    layouts: list[DestLayout] = []
    tp_size = request.tp_size
    for rank in range(tp_size):
        params: list[Param] = []
        loads: list[Load] = []
        for meta in request.tensors:
            rows = meta.shape[0] // tp_size if meta.shape[0] % tp_size == 0 else meta.shape[0]
            first = rank * rows if rows < meta.shape[0] else 0
            shape, dims = (rows, *meta.shape[1:]), range(len(meta.shape))
            stride = tuple(Region((0,) * (len(shape) - dim - 1), shape[dim + 1 :]).num_elements for dim in dims)
            params.append(Param(meta.name, shape, meta.dtype))
            region = Region((first, *(0,) * (len(shape) - 1)), shape)
            loads.append(Load(meta.name, region, tuple(dims), meta.name, 0, stride))
        layouts.append(DestLayout(rank, tuple(params), tuple(loads)))
    return tuple(layouts)


@pytest.fixture(autouse=True)
def stand_in_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder, with an engine whose layout needs no vLLM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "offline_layouts", row_layouts)


def planned(*words: str, hardware: Hardware | None = None) -> PlanReport:
    return plan_run(load_run_config([*QUICK, *words]), hardware or Hardware())


def shown(report: PlanReport, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed of it, its lines joined."""
    print_report(report)
    return " ".join(capsys.readouterr().out.split())


def test_the_figures_of_a_plan_add_up():
    report = planned("rollout.num_workers=3", "rollout.tp_size=2")
    summary = report.summary
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values()) == summary.num_bytes
    assert len(summary.sent_bytes) == 2
    assert len(summary.received_bytes) == 6
    # Three engines, each with every tensor once, and a second time what does not divide over its two ranks.
    assert summary.num_bytes >= 3 * report.model.num_bytes
    assert summary.largest_task_bytes <= report.staging.max_task_bytes
    assert report.prediction.peak_bytes <= report.config.weight_sync.watermark_bytes
    assert report.prediction.total_s > report.prediction.floor_s > 0
    assert report.rollout.weights * 2 >= report.model.num_bytes


def test_of_a_range_the_most_engines_are_planned(capsys: pytest.CaptureFixture[str]):
    report = planned("rollout.num_workers=1..3")
    assert report.summary.num_bytes == planned("rollout.num_workers=3").summary.num_bytes
    assert "tp_size 1, at least 1" in shown(report, capsys)


def test_what_is_kept_on_hosts_in_case_something_dies_is_in_the_plan(capsys: pytest.CaptureFixture[str]):
    report = planned()
    assert report.host.trainer_states == 3 * 3 * report.trainer.gradients, "parameters and two moments in float32"
    assert planned(hardware=Hardware(ranks_per_node=1)).host.num_copies == 5, "two nodes with a trainer rank each"
    assert planned("trainer.max_restarts=0").host.trainer_states == 0
    on_host = planned("trainer.optim.state=host")
    assert (on_host.host, on_host.trainer.optimizer) == (report.host, 0)
    assert "of host memory" in shown(on_host, capsys)
    full = planned("trainer=full", "algorithm.kl_coef=0.1").trainer
    assert full.reference == full.gradients > 0
    # Two engines share 16 groups of 24 responses of 4 tokens, of the version that is there and the one before.
    assert report.host.responses == 8 * 24 * 4 * 2 * 80
    assert report.host.most_responses == 4_000_000 * 80
    assert "in case the controller is killed; with evaluations at most 320.00 MB" in shown(report, capsys)
    words = "data.max_prompt_tokens=6", "algorithm.max_staleness_steps=2"
    report = planned("cluster.device=cuda", "parity.replay_routing=true", *words)
    routes = report.model.num_layers * report.model.top_k
    assert report.host.responses == 8 * 24 * (4 + 6) * 4 * (80 + routes), "routes are of prompts, too"
    for word in ("cluster.ray_address=auto", "run.num_steps=0"):
        report = planned(word)
        assert report.host.responses == report.host.most_responses == 0, "they end with the controller"


def test_a_relay_is_planned_beside_the_publish_to_every_engine(capsys: pytest.CaptureFixture[str]):
    words = ["rollout.num_workers=6", "rollout.tp_size=2"]
    assert planned(*words).relay is None
    report = planned(*words, "weight_sync.relay=node", hardware=Hardware(ranks_per_node=4))
    # Two trainer ranks and one engine share node 0; nodes 1 and 2 have two engines each, node 3 has one.
    assert report.relay is not None
    assert report.relay.num_written == 4
    assert report.relay.num_bytes * 6 == report.summary.num_bytes * 4
    assert report.prediction == planned(*words, hardware=Hardware(ranks_per_node=4)).prediction
    said = shown(report, capsys)
    assert "The same with weight_sync.relay=node" in said and "2 engines on their nodes read from them" in said


def test_an_experiment_for_gpus_can_be_planned_where_there_are_none():
    report = planned(
        "cluster.device=auto", "trainer.num_ranks=16", "trainer.ep_size=4", hardware=Hardware(ranks_per_node=4)
    )
    assert report.config.cluster.device.value == "cuda"
    assert report.placement.num_nodes == 5  # 16 trainer ranks and 2 engines, 4 GPUs a node
    assert [rank.rank for rank in report.prediction.senders] == list(range(16))


CHANGES = ["model.dtype=bfloat16", "weight_sync.delta_bytes=100000000"]
KIMI = ["experiment=kimi_k2_fp8_merged", "model.hf_config.num_hidden_layers=2", "weight_sync.delta_bytes=8000000000"]


def publish_of_changes(words: Sequence[str], changed: float | None = 0.05) -> tuple[PlanReport, DeltaChoice]:
    slow = LinkRates(nvlink_bytes_s=1e4, nic_bytes_s=1e4)
    report = plan_run(load_run_config(list(words)), Hardware(rates=slow, changed=changed))
    assert report.delta is not None
    return report, report.delta


def test_a_publish_of_changes_is_planned_beside_the_whole_one() -> None:
    """A record of four bytes for each of 5 % of the two-byte elements, and eight bytes a tile of 4096."""
    report, delta = publish_of_changes([*QUICK, *CHANGES])
    share = (4 * 0.05 + 8 / 4096) / 2
    assert delta.num_bytes == pytest.approx(share * report.summary.num_bytes, abs=1)
    rest_s = report.prediction.total_s - report.prediction.floor_s
    assert delta.zone_bytes == 100_000_000
    assert delta.kept_bytes > report.trainer.adapters > 0, "two ranks gather A, too"
    assert delta.total_s - rest_s == pytest.approx(share * report.prediction.floor_s, rel=0.02)
    # A zone for half of what changed: the other half goes whole.
    half = round(share * max(report.summary.received_bytes.values()) / 2)
    _, less = publish_of_changes([*QUICK, CHANGES[0], f"weight_sync.delta_bytes={half}"])
    assert less.num_bytes == pytest.approx((share + 1) / 2 * report.summary.num_bytes, rel=1e-3)
    _, much = publish_of_changes([*QUICK, *CHANGES], 0.13)  # more than a quarter of the bytes
    assert much.num_bytes == report.summary.num_bytes
    assert [publish_of_changes(words, None)[1].changed for words in ([*QUICK, *CHANGES], KIMI)] == [0.01, 0.001]
    assert planned().delta is None
    with pytest.raises(ConfigError, match=r"--changed has no effect with weight_sync\.delta_bytes=0"):
        planned(hardware=Hardware(changed=0.05))


def test_what_full_training_and_fp8_compare_with_is_kept_on_the_host_and_scales_go_whole() -> None:
    full, delta = publish_of_changes([*QUICK, *CHANGES, "trainer.mode=full"])
    per_engine = full.summary.num_bytes / full.config.rollout.most_workers
    assert delta.kept_bytes == 0 and per_engine / 2 <= delta.host_bytes < per_engine, "by two ranks"
    fp8, delta = publish_of_changes(KIMI)
    assert delta.kept_bytes == 0 < delta.host_bytes
    rollout, hf_config = fp8.config.rollout, resolve_hf_config(fp8.config.model)
    request = SimpleNamespace(tp_size=rollout.tp_size, tensors=engine_checkpoint(hf_config, DType.bfloat16))
    scales = [one for layout in row_layouts(request) for one in layout.params if one.dtype == "float32"]
    whole = rollout.most_workers * sum(one.num_bytes for one in scales)
    share = (4 * (1 - 0.95**2) + 8 / 4096) / 2  # an element is two values
    assert whole > 0 and delta.num_bytes == pytest.approx(share * (fp8.summary.num_bytes - whole) + whole, abs=1)


def test_a_publish_of_factors_is_planned_beside_the_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Every engine gets A and B; the sum of both is what the trainer holds, for each engine once."""
    slow = LinkRates(nvlink_bytes_s=1e4, nic_bytes_s=1e4)
    report = planned("weight_sync.remote_merge=host", hardware=Hardware(rates=slow))
    assert report.remote_merge is not None
    assert report.remote_merge.num_bytes < report.summary.num_bytes / 2
    assert report.remote_merge.total_s < report.prediction.total_s / 2
    assert 0 < report.remote_merge.base_bytes < report.rollout.weights
    assert "engines that merge for themselves (weight_sync.remote_merge)" in shown(report, capsys)
    assert as_plain(report)["remote_merge"] == asdict(report.remote_merge)
    assert planned().remote_merge is None


def test_engines_that_get_adapters_are_not_said_to_pause(capsys: pytest.CaptureFixture[str]) -> None:
    for words, is_paused in ((QUICK, True), (["experiment=quickstart_adapter"], False)):
        assert main(["plan", *words]) == 0
        assert ("pause the engines" in capsys.readouterr().out) == is_paused


def test_the_command_prints_and_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK]) == 0
    out = capsys.readouterr().out
    for words in ("8 experts (top-2)", "Publish (plan ", "max/mean", "estimated", "Predicted publish", "total"):
        assert words in out
    assert "Nothing was started" in out
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["plan", "timeline.png"]
    assert (tmp_path / "plan" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_json_holds_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "--json", "--output", str(tmp_path / "x"), "--nic-gb-s", "44"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = planned()
    assert found["plan"]["digest"] == report.summary.digest
    assert sum(found["plan"]["sent_bytes"]) == found["plan"]["bytes"] == report.summary.num_bytes
    assert found["rates"]["nic_bytes_s"] == 44e9
    assert found["memory_estimate"]["trainer_gpu"]["weights"] == report.trainer.weights
    assert found["predicted_s"]["total"] >= found["predicted_s"]["receiver_floor"]


def test_layouts_are_kept_where_the_command_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Mock(side_effect=row_layouts)
    monkeypatch.setattr(estimate, "offline_layouts", recorder)
    assert main(["plan", *QUICK, "--layout-cache", str(tmp_path / "kept")]) == 0
    assert recorder.call_args.args[1] == tmp_path / "kept"


def test_rates_and_slow_ranks_of_the_command_line_reach_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*flags: str) -> float:
        assert main(["plan", *QUICK, "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)["predicted_s"]["total"]

    slow_wire = ["--nvlink-gb-s", "0.001", "--nic-gb-s", "0.001"]
    assert total(*slow_wire) > 1 > total()
    assert total(*slow_wire, "--slow-rank", "0=3") > 2 * total(*slow_wire)
    assert total("--hbm-gb-s", "0.001") > total()


def test_engines_that_share_a_gpu_share_its_link_in_a_plan():
    """GPUs of one node each: bytes of all engines pass one NIC, or one each."""
    rates = LinkRates(nic_bytes_s=1e6, begin_s=0, barrier_s=0, commit_s=0)
    apart, together = (
        planned("cluster.device=cuda", *words, hardware=Hardware(ranks_per_node=1, rates=rates))
        for words in (["rollout.num_workers=3"], ["rollout.num_workers=3", "rollout.workers_per_gpu=3"])
    )
    assert apart.config.rollout.num_workers == together.config.rollout.num_workers == 3
    assert len(set(apart.placement.engine_gpus.values())) == 3
    assert set(together.placement.engine_gpus.values()) == {len(together.placement.trainer_gpus)}
    assert together.prediction.total_s > apart.prediction.total_s


def test_nics_that_deliver_less_are_shown_beside_their_line_rate():
    report = planned("trainer.num_ranks=16", hardware=Hardware(ranks_per_node=4))
    (line, at_line), (seen, at_seen) = report.total_s_by_nic.items()
    assert (line, seen) == (50e9, 44e9)
    assert at_line == report.prediction.total_s < at_seen


def test_modes_are_compared_and_the_loss_of_decode_speed_decides():
    free, costly = (
        planned("cluster.device=cuda", hardware=Hardware(adapter_decode_loss=loss)).modes for loss in (0.0, 0.5)
    )
    assert free.merged_s is not None and free.adapter_s is not None
    assert free.break_even_s == float("inf")
    assert costly.break_even_s == pytest.approx((free.merged_s - free.adapter_s) / 0.5)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["trainer.mode=full"], "weight_sync.mode=adapter contradicts trainer.mode=full, which trains no adapter"),
        (["model=tiny_deepseek_v3", "cluster.device=cuda"], "weight_sync.mode=adapter: the latent attention of"),
        (["model=tiny_qwen3_moe"], "weight_sync.mode=adapter: the CPU engine serves no adapters in a model with"),
    ],
)
def test_a_mode_that_a_run_is_refused_is_not_compared_and_the_report_has_the_same_words(words, why, capsys):
    modes = planned(*words).modes
    assert modes.merged_s is not None
    assert modes.adapter_s is None
    with pytest.raises(ConfigError) as refused:  # the run itself, by the same options
        planned(*words, "weight_sync.mode=adapter")
    assert modes.no_adapter == str(refused.value)
    assert modes.no_adapter.startswith(why)
    assert f"refused: {why}" in shown(planned(*words), capsys)


@pytest.mark.parametrize(
    ("enable_expert_parallel", "num_bytes"),
    [
        # 24 experts per rank of EP16, 1 layer, r=32, bfloat16: 3 x (7168 + 2048) x 32 x 24 x 2; 60 layers: 2.55 GB
        (True, 3 * 9216 * 32 * 24 * 2),
        # Under TP16 all 384 experts: 3 x (7168 + 128) x 32 x 384 x 2; 60 layers: 32.3 GB
        (False, 3 * 7296 * 32 * 384 * 2),
    ],
)
def test_an_adapter_slot_of_kimi_k2_has_the_known_size(enable_expert_parallel: bool, num_bytes: int) -> None:
    spec = read_config(load_run_config(KIMI).model.hf_config)
    factors = tuple(adapter_tensors(spec.checkpoint_tensors("bfloat16"), LoraConfig(rank=32, targets=("experts",))))
    rollout = RolloutConfig(tp_size=16, enable_expert_parallel=enable_expert_parallel)
    assert sum(param.num_bytes for param in adapter_slot(factors, rollout, {}).params) == num_bytes


def test_an_adapter_plan_of_kimi_k2_sends_every_factor_once_and_a_shared_one_once_a_gpu() -> None:
    words = ["model.hf_config.num_hidden_layers=3", "trainer.num_ranks=256", "rollout.num_workers=8"]
    report = plan_run(load_run_config(["experiment=kimi_k2_thinking_lora", *words]), Hardware())
    # 24 experts a rank of EP16, 2 layers, r=32: A of gate, A of down, three B
    received = (7168 + 2048 + 2 * 2048 + 7168) * 32 * 24 * 2 * 2
    assert set(report.summary.received_bytes.values()) == {received}
    slot, shared = report.modes.slot_bytes, 7168 * 32 * 24 * 2 * 2
    assert slot == received + shared
    assert report.rollout.slots == slot * report.rollout.num_slots
    assert report.modes.merged_s is None
    assert report.summary.send_balance == 1.0  # 384 experts over 256 ranks, 1 and 2 in turns


def test_memory_of_an_int4_base_is_that_of_what_is_stored() -> None:
    """Two cuts of Kimi-K2-Thinking, whose layers but the first are alike; an even share of it on an engine's 4 GPUs."""
    words = ["experiment=kimi_k2_thinking_lora", "rollout.num_workers=1", "rollout.tp_size=4"]
    small, report = (
        plan_run(load_run_config([*words, f"model.hf_config.num_hidden_layers={layers}"]), Hardware())
        for layers in (2, 4)
    )
    a_layer = (report.model.num_bytes - small.model.num_bytes) / 2
    assert report.model.num_bytes + 57 * a_layer == pytest.approx(594e9, rel=0.01), "as all 61 are published"
    assert report.rollout.weights == report.model.num_bytes // 4
    assert report.rollout.slots == report.rollout.num_slots * report.modes.slot_bytes > 0
    # 384 experts a layer over 256 ranks in 4.5 bits; beside them two layers unpacked, and a share of dense tensors
    experts = 1.5 * 3 * 7168 * 2048
    packed, unpacked = 3 * experts * 4.5 / 8, 2 * 2 * experts
    assert packed < report.trainer.weights < packed + unpacked + 0.2e9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nic-gb-s", "0"], "--nic-gb-s must be > 0"),
        (["--nvlink-gb-s", "fast"], "--nvlink-gb-s must be a number, got 'fast'"),
        (["--slow-rank", "three"], "--slow-rank takes RANK=FACTOR"),
        (["--slow-rank", "0=0.5"], "at least 1 times slower"),
        (["--slow-rank", "7=2"], "--slow-rank names trainer rank 7; there are 2"),
        (["--changed", "2"], "--changed is a share of all elements, in [0, 1], got 2"),
        (["--ranks-per-node", "0"], "--ranks-per-node must be >= 1, got 0"),
        (["--slow-ranks", "0=2"], "unknown flag --slow-ranks. Did you mean --slow-rank?"),
        (["algorithm=sft"], "algorithm=sft publishes nothing"),
        (["weight_sync.watermark_bytes=65536"], "raise the watermark"),
        (["rollout.tp_size=3"], "rollout.tp_size=3 does not divide"),
        (["trainer.num_rank=2"], "trainer.num_ranks"),
        (["--output", "/proc/nowhere"], "--output=/proc/nowhere cannot be written"),
    ],
)
def test_mistakes_come_with_a_cure_and_no_traceback(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *QUICK, *words]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ")
    assert told in error
    assert bool(out) == ("cannot be written" in told), "figures are shown before the picture is written"


def test_an_engine_that_cannot_be_recorded_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "offline_layouts", Mock(side_effect=EngineError("no vLLM is installed")))
    assert main(["plan", *QUICK]) == 2
    assert capsys.readouterr().err == "error: no vLLM is installed\n"


def test_planning_needs_neither_torch_nor_an_engine_in_its_own_process() -> None:
    code = "import sys, slipstream.orchestrator.offline.estimate; print({'torch', 'vllm', 'ray'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"


@pytest.mark.parametrize(
    ("preset", "experts"),
    [("deepseek_v3_2", "n_routed_experts"), ("gemma3_27b", None), ("gemma4_31b", None), ("gemma4_26b_a4b", None),
     ("glm_4_7_flash", "n_routed_experts"), ("glm_5", "n_routed_experts"), ("minimax_m2", "num_local_experts"),
     ("qwen3_5_27b", None), ("qwen3_5_35b_a3b", "num_experts"), ("qwen3_next_80b_a3b", "num_experts")],
)  # fmt: skip
def test_a_published_shape_is_planned(preset: str, experts: str | None) -> None:
    """Six of its layers, so one of each kind, with 16 experts: engines get every tensor, and nothing else."""
    words = [f"model={preset}", "++model.hf_config.num_hidden_layers=6", "++model.hf_config.quantization_config=null"]
    words += ["cluster.device=cuda", "rollout.num_workers=1", "trainer.ep_size=1"]
    words += ["weight_sync.watermark_bytes=1073741824"]
    report = planned(*words, *([f"++model.hf_config.{experts}=16"] if experts else []))
    tensors = read_config(resolve_hf_config(report.config.model)).checkpoint_tensors("bfloat16")
    params = [Param(meta.name, meta.shape, meta.dtype) for meta in tensors]
    assert report.summary.num_bytes == sum(param.num_bytes for param in params)
