"""The variables of a run: each with a reason, the user's own respected unless a run is wrong with them."""

import pytest

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device
from slipstream.orchestrator import environment
from slipstream.orchestrator.cluster.ray_cluster import RAY_TIMEOUT_S
from slipstream.orchestrator.environment import Variable, apply, resolve_device, variables, variables_for_actors
from slipstream.orchestrator.machine import Machine
from slipstream.rollout.engine.engine_options import METHOD_VARIABLE


def run_environment(device: environment.RunDevice, *, is_own_cluster: bool = True) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables(device, is_own_cluster=is_own_cluster)}


def test_cpu_processes_take_turns_on_one_thread_each() -> None:
    found = run_environment("cpu")
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "NCCL_NVLS_ENABLE" not in found


def test_gpu_processes_use_no_multicast() -> None:
    found = run_environment("cuda")
    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert found["NVSHMEM_DISABLE_NVLS"] == "1"
    assert "OMP_NUM_THREADS" not in found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_may_be_forked(device: environment.RunDevice) -> None:
    """With a method of the run's, they would import vLLM once more: 15 s of every start and recovery."""
    assert METHOD_VARIABLE not in run_environment(device)


def test_ray_keeps_its_authentication_on_a_cluster_that_is_not_ours() -> None:
    own = {"RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_worker_niceness", "GLOO_SOCKET_IFNAME"}
    assert own <= run_environment("cpu").keys()
    assert float(run_environment("cpu")["RAY_DASHBOARD_STARTUP_TIMEOUT_S"]) == RAY_TIMEOUT_S, "the page is waited for"
    assert not own & run_environment("cpu", is_own_cluster=False).keys()


def test_actors_of_a_cluster_that_is_not_ours_get_the_users_values_and_what_concerns_links() -> None:
    config = load_run_config(["experiment=quickstart", "cluster.ray_address=10.0.0.1:6379", "cluster.device=cuda"])
    here = {"NCCL_NVLS_ENABLE": "1", "NCCL_IB_HCA": "mlx5_0", "MC_GID_INDEX": "3", "HOME": "/home/me"}
    given = variables_for_actors(config, here)
    assert given["NCCL_NVLS_ENABLE"] == "1", "kept, as the command line says"
    assert given["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (given["NCCL_IB_HCA"], given["MC_GID_INDEX"]) == ("mlx5_0", "3")
    assert "HOME" not in given


def test_the_users_value_wins_and_that_is_said() -> None:
    environ = {"KEPT": "theirs", "SAME": "ours"}
    chosen = (
        Variable("KEPT", "ours", "a matter of taste"),
        Variable("SAME", "ours", "no difference"),
        Variable("ABSENT", "ours", "not set yet"),
    )
    (note,) = apply(chosen, environ)
    assert environ == {"KEPT": "theirs", "SAME": "ours", "ABSENT": "ours"}
    assert note == "KEPT=theirs from the environment is kept; Slipstream's is ours: a matter of taste"


def test_a_cluster_of_our_own_asks_for_a_token_whatever_the_shell_says() -> None:
    environ = {"RAY_AUTH_MODE": "disabled"}
    (note,) = apply([one for one in variables("cpu") if one.name == "RAY_AUTH_MODE"], environ)
    assert environ == {"RAY_AUTH_MODE": "token"}
    assert note.startswith("RAY_AUTH_MODE=disabled from the environment is not used, but token: ")


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "cuda")])
def test_auto_takes_gpus_when_there_are_any(num_gpus: int, device: str) -> None:
    machine = Machine(count_gpus=lambda: num_gpus)
    assert resolve_device(Device.auto, machine) == device
    assert resolve_device(Device.cpu, machine) == "cpu"
    assert resolve_device(Device.cuda, machine) == "cuda"
