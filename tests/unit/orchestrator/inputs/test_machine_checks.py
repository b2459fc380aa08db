"""A run that the machine cannot hold is refused with the options that would fit."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, RunConfig
from slipstream.orchestrator.cli.doctor import Status, processors_and_memory
from slipstream.orchestrator.environment import resolve_device
from slipstream.orchestrator.inputs import machine_checks
from slipstream.orchestrator.inputs.facts import Fact
from slipstream.orchestrator.inputs.machine_checks import (
    check_base_has_room,
    check_caches,
    check_dashboard_port,
    check_devices,
    check_link,
    check_memory,
    check_open_files,
    check_ray_cluster,
    check_shared_memory,
    check_sockets,
    check_zone_has_room,
)
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, resolve_hf_config
from slipstream.orchestrator.inputs.preflight import run_preflight
from slipstream.orchestrator.machine import HERE, Gpu, Machine, is_slow_in_bfloat16
from slipstream.weight_sync.layout import DTYPE_BYTES

Check = Callable[[RunConfig, Machine], Fact | None]


def config_of(*words: str) -> RunConfig:
    """A quick start."""
    return load_run_config(["experiment=quickstart", "cluster.device=cpu", *words])


def found(check: Check, machine: Machine, *words: str) -> Fact:
    fact = check(config_of(*words), machine)
    assert fact is not None
    return fact


def refused(check: Check, machine: Machine, *words: str) -> str:
    """What a check says about a quick start on a machine."""
    with pytest.raises(ConfigError) as caught:
        check(config_of(*words), machine)
    return str(caught.value)


MIB = 1 << 20
RAY = "cluster.ray_address=10.0.0.1:6379"
CUDA, SFT, GPUS = "cluster.device=cuda", "experiment=sft_quickstart", "experiment=quickstart_gpu"


def gpus(count: int, *, is_set_up: bool = False) -> Machine:
    return Machine(count_gpus=lambda: count, count_cpus=lambda: 1, is_set_up_for_gpus=lambda: is_set_up)


SIX = ["rollout.num_workers=6", "rollout.workers_per_gpu=3"]
FREE, TAKEN = Machine(is_port_free=lambda port: port != 8265), Machine(is_port_free=lambda port: False)


@pytest.mark.parametrize(
    ("check", "machine", "words", "said"),
    [
        (
            check_devices, gpus(2), [CUDA, "rollout.num_workers=3"],
            [
                "more GPUs than exist", "trainer.num_ranks=2", "rollout.num_workers=3", "rollout.tp_size=1",
                "need 5, and this machine has 2",
            ],
        ),
        (check_devices, gpus(3), [CUDA, *SIX], ["* rollout.tp_size=1 / rollout.workers_per_gpu=3 need 4"]),
        (check_devices, gpus(0), [CUDA], ["no usable CUDA GPU; set cluster.device=cpu"]),
        (
            check_devices, gpus(0), [CUDA, "weight_sync.transport=nvlink"],
            ["set cluster.device=cpu weight_sync.transport=auto"],
        ),
        *(
            (
                check_devices, gpus(0, is_set_up=True), [f"cluster.device={device}"],
                ["this machine has no usable CUDA GPU", "start the run where GPUs are", "SLIPSTREAM_TARGET=cpu make"],
            )
            for device in ("cuda", "cpu")
        ),
        (check_devices, gpus(2, is_set_up=True), [], ["cluster.device=cpu, but the installed vLLM"]),
        (
            check_memory, Machine(memory_bytes=lambda: (1 << 34, 1 << 20)), ["rollout.num_workers=1..3"],
            ["rollout.num_workers=1..3 * rollout.tp_size=1 need at least"],
        ),
        (
            check_memory, Machine(), ["model.dtype=bfloat16", "weight_sync.delta_bytes=1000000000000"],
            ["or rollout.kv_cache_bytes, or lower weight_sync.delta_bytes"],
        ),
        (check_link, Machine(list_rdma_nics=list), ["weight_sync.transport=rdma"], ["no RDMA device"]),
        (
            check_ray_cluster, Machine(running_ray_cluster=lambda: None), ["cluster.ray_address=auto"],
            ["cluster.ray_address=auto", "cluster=local"],
        ),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_refused_with_the_options_that_would_fit(
    check: Check, machine: Machine, words: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    message = refused(check, machine, *words)
    assert all(one in message for one in said), message


@pytest.mark.parametrize(
    ("check", "machine", "words", "finding"),
    [
        (check_devices, gpus(8), [], "CPU, 1 core: 2 trainer ranks, 2 engines"),
        (check_devices, gpus(2), [GPUS, CUDA, "rollout.num_workers=1..3"],
         "2 of 2 GPUs: 1 trainer rank, 1 to 3 engines"),
        (check_devices, gpus(1), ["experiment=quickstart_one_gpu", CUDA], "1 of 1 GPUs: 1 trainer rank, 1 engine"),
        (check_devices, gpus(3), [GPUS, CUDA, *SIX], "3 of 3 GPUs: 1 trainer rank, 6 engines, 3 on a GPU"),
        (check_devices, gpus(8), [CUDA, "rollout.tp_size=2"],
         "6 of 8 GPUs: 2 trainer ranks, 2 engines of 2 processes each"),
        (check_devices, gpus(8), [SFT, CUDA], "2 of 8 GPUs: 2 trainer ranks"),
        (check_devices, gpus(0, is_set_up=True), [SFT], "CPU, 1 core: 2 trainer ranks"),
        (check_link, Machine(), [], "travel over the fastest link that both ends have"),
        (check_link, Machine(), ["weight_sync.transport=tcp"], "travel over tcp"),
        (check_ray_cluster, Machine(running_ray_cluster=lambda: "10.0.0.2:6380"), [], "a cluster of its own"),
        (check_dashboard_port, FREE, ["cluster.dashboard=false"], "off"),
        (check_dashboard_port, FREE, ["cluster.dashboard=true"], "http://127.0.0.1:8266 (8265 is taken)"),
        (check_dashboard_port, TAKEN, ["cluster.dashboard=true"], "on a port of Ray's choice"),
    ],
)  # fmt: skip
def test_what_fits_is_told(check: Check, machine: Machine, words: list[str], finding: str) -> None:
    assert found(check, machine, *words).finding == finding


def test_what_is_hidden_is_told_and_a_login_node_is_none_to_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    message = refused(check_devices, gpus(1), SFT, CUDA)
    assert "trainer.num_ranks=2 need 2, and this machine has 1 with CUDA_VISIBLE_DEVICES='0'; lower them" in message
    assert resolve_device(Device.auto, gpus(0, is_set_up=True)) == "cuda"
    assert check_link(load_run_config([SFT]), Machine()) is None


def test_a_cpu_without_avx512_is_told_from_one_that_has_it(tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    for text, is_slow in (
        ("flags\t\t: fpu avx avx2 fma", True),
        ("flags\t\t: avx2 avx512f avx512_bf16", False),
        ("Features\t: fp asimd", False),
    ):
        facts.write_text(f"processor\t: 0\n{text}\n")
        assert is_slow_in_bfloat16(facts) == is_slow


def test_bfloat16_on_a_cpu_that_is_slow_in_it_is_a_warning_with_its_cure() -> None:
    slow = Machine(is_slow_in_bfloat16=lambda: True, is_set_up_for_gpus=lambda: False)
    words = ["experiment=quickstart", "cluster.device=cpu", "model.dtype=bfloat16"]
    fact = check_devices(load_run_config(words), slow)
    assert fact.is_warning
    assert "; set model.dtype=float32" in fact.finding
    quick = Machine(is_slow_in_bfloat16=lambda: False, is_set_up_for_gpus=lambda: False)
    for same in (check_devices(load_run_config(words), quick), check_devices(load_run_config(words[:2]), slow)):
        assert not same.is_warning
        assert same.finding.endswith("2 engines")


@pytest.mark.parametrize(
    ("words", "num_copies", "num_ranks", "num_engine_ranks", "cache_mib"),
    [
        ([], 3, 2, 2, 64),
        (["rollout.kv_cache_bytes=null"], 3, 2, 2, 256),
        (["rollout.num_workers=1", "rollout.tp_size=2"], 2, 2, 2, 64),
        (["trainer.num_ranks=1", "trainer.ep_size=1", "rollout.num_workers=4", "model.dtype=bfloat16"], 5, 1, 4, 64),
        (["experiment=sft_quickstart"], 1, 2, 0, 64),
    ],
)
def test_memory_is_that_of_weights_processes_and_caches(
    words: list[str], num_copies: int, num_ranks: int, num_engine_ranks: int, cache_mib: int
) -> None:
    """Trainer ranks share one copy of the weights, and each engine has one: to the byte."""
    config = load_run_config(["experiment=quickstart", "cluster.device=cpu", *words])
    sizes = [math.prod(meta.shape) for meta in read_config(config.model.hf_config).checkpoint_tensors("float32")]
    weights = sum(sizes) * (2 if "model.dtype=bfloat16" in words else 4)
    needed = num_copies * weights + 300 * MIB * num_ranks + (400 + cache_mib) * MIB * num_engine_ranks
    enough, too_small = (
        Machine(memory_bytes=lambda free=free: (1 << 40, free), count_cpus=lambda: 8) for free in (needed, needed - 1)
    )
    fact = found(check_memory, enough, *words)
    assert fact.finding == f"needs at least {needed / 1e9:.1f} GB, {needed / 1e9:.1f} GB are free"
    message = refused(check_memory, too_small, *words)
    assert message.startswith(
        f"trainer.num_ranks={num_ranks}{' and rollout.num_workers' if num_engine_ranks else ' need'}"
    )
    assert f"GB are free; lower {'them, or rollout.kv_cache_bytes' if num_engine_ranks else ''}" in message


MERGING = ["model.dtype=bfloat16", "cluster.device=cuda", "trainer.num_ranks=1", "trainer.ep_size=1"]


@pytest.mark.parametrize(
    ("words", "share", "room", "cure"),
    [
        (["host"], 2, "of host memory", "lower rollout.num_workers"),
        (["host", "rollout.tp_size=2"], 2, "of host memory", "lower rollout.num_workers"),
        (["gpu", "rollout.kv_cache_bytes=null"], 1, "beside its engine", "lower rollout.gpu_memory_utilization, set"),
        (["gpu", "rollout.kv_cache_bytes=null", "rollout.tp_size=2"], 0.5, "beside its engine", "remote_merge=host"),
        (["gpu"], 1, "beside its engine", "lower rollout.kv_cache_bytes, set weight_sync.remote_merge=host"),
    ],
)
def test_a_base_that_finds_no_room_is_refused_before_a_start(
    words: list[str], share: float, room: str, cure: str
) -> None:
    """All matrices of layers, to the byte: two engines have one each on a host, ranks of one engine share one."""
    where, *rest = words
    given = [*MERGING, f"weight_sync.remote_merge={where}", *rest]
    config = load_run_config(["experiment=quickstart", *given])
    tensors = read_config(config.model.hf_config).checkpoint_tensors("bfloat16")
    adapted = sum(math.prod(m.shape) for m in tensors if m.name.endswith("_proj.weight"))
    base = round(2 * adapted * share)
    weights = 2 * sum(math.prod(m.shape) for m in tensors)
    taken = 0 if config.rollout.kv_cache_bytes is None else weights + config.rollout.kv_cache_bytes

    def with_room(free: int) -> Machine:
        gpu = taken + free if taken else math.ceil(free / (1 - config.rollout.gpu_memory_utilization))
        return Machine(list_gpus=lambda: [Gpu(0, "", gpu, "")], memory_bytes=lambda: (1 << 40, free))

    assert room in found(check_base_has_room, with_room(base), *given).finding
    message = refused(check_base_has_room, with_room(base - 8), *given)
    assert room in message and cure in message and message.endswith("or set weight_sync.remote_merge=none")
    for left_out in (["weight_sync.remote_merge=none"], ["cluster.device=cpu", "weight_sync.remote_merge=host"]):
        on = load_run_config(["experiment=quickstart", *MERGING, *left_out])
        assert check_base_has_room(on, with_room(0)) is None


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ([], "kv_cache_bytes"),
        (["rollout.kv_cache_bytes=null"], "gpu_memory_utilization"),
        (["model.engine_format=block_fp8"], "kv_cache_bytes"),
    ],
)
def test_a_zone_for_changes_that_finds_no_room_is_refused_before_a_start(words: list[str], cure: str) -> None:
    given = [*MERGING, *words, "weight_sync.delta_bytes=1000000"]
    config = load_run_config(["experiment=quickstart", *given])
    tensors = engine_checkpoint(resolve_hf_config(config.model), config.model.dtype)
    weights = sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)
    cache = config.rollout.kv_cache_bytes
    enough = round(1e6 / (1 - config.rollout.gpu_memory_utilization)) if cache is None else weights + cache + 10**6

    def with_gpu(num_bytes: int) -> Machine:
        return Machine(list_gpus=lambda: [Gpu(0, "", num_bytes, "")])

    assert "beside its engine" in found(check_zone_has_room, with_gpu(enough + 2), *given).finding
    message = refused(check_zone_has_room, with_gpu(enough - 20), *given)
    assert message.startswith("weight_sync.delta_bytes takes") and message.endswith("or lower weight_sync.delta_bytes")
    assert cure in message
    assert check_zone_has_room(config, Machine(list_gpus=list)) is None
    assert check_zone_has_room(load_run_config(["experiment=quickstart"]), with_gpu(0)) is None


def test_memory_on_cpus_counts_what_engines_merge_into() -> None:
    words = ["weight_sync.remote_merge=host"]
    free = int(float(found(check_memory, Machine(), *words).finding.split()[3]) * 1e9)
    small = Machine(memory_bytes=lambda: (1 << 40, free // 2))
    assert refused(check_memory, small, *words).endswith(
        "or rollout.kv_cache_bytes, or set weight_sync.remote_merge=none"
    )


def test_many_processes_for_the_cores_are_a_warning() -> None:
    two = Machine(memory_bytes=lambda: (1 << 40, 1 << 40), count_cpus=lambda: 2)
    for num_workers, is_warning in ((14, False), (15, True)):  # and two trainer ranks, eight on a core
        fact = found(check_memory, two, f"rollout.num_workers={num_workers}")
        assert fact.is_warning == is_warning
        assert ("are many processes for 2 cores; lower them" in fact.finding) == is_warning


def test_machines_of_a_ray_cluster_are_not_looked_at() -> None:
    def looks(*_: object) -> int:
        raise AssertionError("this machine is looked at")

    nobody = Machine(
        count_gpus=looks, memory_bytes=looks, free_bytes=looks, is_port_free=looks, list_rdma_nics=list,  # type: ignore[arg-type]
        is_set_up_for_gpus=lambda: False,
    )  # fmt: skip
    for check in (check_memory, check_shared_memory, check_sockets):
        assert found(check, nobody, RAY).finding.startswith("not looked at")
    gpus = found(check_devices, nobody, RAY, "cluster.device=cuda").finding
    assert gpus == "GPUs of the Ray cluster at 10.0.0.1:6379: 2 trainer ranks, 2 engines"
    assert found(check_dashboard_port, nobody, RAY).finding == "the Ray cluster's own"
    assert (
        found(check_link, nobody, RAY, "cluster.device=cuda", "weight_sync.transport=rdma").finding
        == "travel over rdma"
    )


def test_a_ray_cluster_is_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked: list[tuple[str, int]] = []
    is_up = True
    monkeypatch.setattr(machine_checks, "answers", lambda host, port: asked.append((host, port)) or is_up)
    here = Machine(running_ray_cluster=lambda: "10.0.0.2:6380")
    auto = ["cluster.ray_address=auto"]
    assert found(check_ray_cluster, here, *auto).finding == "the cluster at 10.0.0.2:6380"
    assert found(check_ray_cluster, here, RAY).finding == "the cluster at 10.0.0.1:6379"
    assert asked == [("10.0.0.2", 6380), ("10.0.0.1", 6379)]
    is_up = False
    assert "nothing answers at 10.0.0.1:6379" in refused(check_ray_cluster, here, RAY)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert found(check_ray_cluster, Machine(running_ray_cluster=lambda: None), *auto).finding.endswith(
        "ray://head:10001"
    )


def test_shared_memory_holds_queues_and_the_store_to_the_byte() -> None:
    enough, slow, small = (
        Machine(free_bytes=lambda folder, free=free: {Path("/dev/shm"): free}[folder])
        for free in (512 * MIB, 512 * MIB - 1, 320 * MIB - 1)
    )
    words = "rollout.tp_size=2"
    assert found(check_shared_memory, enough, words) == Fact("/dev/shm", "512 MiB free")
    fact = found(check_shared_memory, slow, words)
    assert fact.is_warning and "files in /tmp, which is slower" in fact.finding
    message = refused(check_shared_memory, small, words)
    assert "rollout.num_workers=2 engines of rollout.tp_size=2 take 320 MiB" in message and "enlarge it" in message


def test_caches_need_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    for home, why in (("/proc", "No such file or directory"), (str(tmp_path / "file"), "Not a directory")):
        monkeypatch.setenv("HOME", home)
        told = f"{home}/.cache cannot be written ({why}), where vLLM, PyTorch and Slipstream keep what they compile"
        assert told in refused(check_caches, Machine())
        with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder of yours"):
            run_preflight(load_run_config(["experiment=quickstart", f"run.dir={tmp_path}"]))
        assert [one.status for one in processors_and_memory(HERE) if one.name == "caches"] == [Status.fail]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert found(check_caches, Machine()).finding == f"in {tmp_path / 'caches'}"
    assert list((tmp_path / "caches").iterdir()) == [], "nothing is left of the look"


def test_a_folder_for_temporary_files_without_room_is_a_warning() -> None:
    folder = Path(tempfile.gettempdir())
    small, large = (Machine(free_bytes=lambda of, free=free: {folder: free}[of]) for free in (8 << 20, 256 << 20))
    assert found(check_sockets, large) == Fact("sockets", f"in {folder}")
    fact = found(check_sockets, small)
    assert fact.is_warning
    assert fact.finding.startswith(f"in {folder}; it has 8 MiB of free space, and Ray's logs and temporary files lie")
    assert fact.finding.endswith("make room, or set TMPDIR to another folder")


def test_few_open_files_are_a_warning_with_the_command() -> None:
    fact = found(check_open_files, Machine(most_open_files=lambda: 1024))
    assert fact.is_warning and fact.finding.startswith("at most 1024 a process") and "ulimit -n 65536" in fact.finding
    assert check_open_files(load_run_config(["experiment=quickstart"]), Machine(most_open_files=lambda: 8192)) is None
