"""Doctor's judgements: what is wrong is said with its cure, and only what a run needs makes it fail."""

import json
import os
from pathlib import Path

import pytest

from slipstream.orchestrator.cli import doctor
from slipstream.orchestrator.cli.doctor import Finding, Status, Supported, judge_package
from slipstream.orchestrator.cluster.private_folder import make_private_folder
from slipstream.orchestrator.machine import HERE, Gpu, Machine

TORCH = Supported("torch", ("2.13", "2.11"), ("torch",))
MOONCAKE = Supported("mooncake", ("0.3.13",), ("mooncake-a", "mooncake-b"))
OPTIONAL = Supported("triton", ("3.7",), ("triton",), is_required=False)


@pytest.mark.parametrize(
    ("package", "installed", "status", "words"),
    [
        (TORCH, {"torch": "2.13.0+cpu"}, Status.ok, "2.13.0+cpu"),
        (TORCH, {"torch": "2.11.1"}, Status.ok, "2.11.1"),
        (TORCH, {"torch": "2.13+cpu"}, Status.ok, "2.13+cpu"),
        (TORCH, {"torch": "2.130.0"}, Status.warn, "tested with 2.13 or 2.11"),
        (TORCH, {}, Status.fail, "make setup"),
        (OPTIONAL, {}, Status.note, "absent"),
        (MOONCAKE, {"mooncake-a": "0.3.13.post1"}, Status.ok, "0.3.13"),
        (MOONCAKE, {"mooncake-a": "0.3.13", "mooncake-b": "0.3.13"}, Status.fail, "keep one"),
    ],
)
def test_packages_are_judged(package: Supported, installed: dict[str, str], status: Status, words: str) -> None:
    finding = judge_package(package, installed)
    assert finding.status is status
    assert words in f"{finding.value} {finding.advice}"


def test_small_shared_memory_is_a_warning_with_a_cure() -> None:
    machine = Machine(free_bytes=lambda folder: 64 << 20)
    (finding,) = [one for one in doctor.processors_and_memory(machine) if "shm" in one.name]
    assert finding.status is Status.warn
    assert "--shm-size" in finding.advice


NO_DRIVER = "TransferFailed: Mooncake cannot be loaded (libcuda.so.1: cannot open shared object file)"
ABSENT = "TransferFailed: Mooncake cannot be loaded (libmlx5.so.1: cannot open shared object file)"


def test_a_login_node_is_whole_and_no_run_can_work_there(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(list_gpus=list, count_gpus=lambda: 0, is_set_up_for_gpus=lambda: True)
    findings = [*doctor.gpus_and_links(machine), doctor.mooncake_library(machine, lambda code: NO_DRIVER)]
    assert [finding.status for finding in findings] == [Status.warn, Status.note]
    assert doctor.print_findings(findings, as_json=False) == 0
    assert "Nothing to repair; no run can work here without a GPU" in capsys.readouterr().out
    doctor.print_findings(findings, as_json=True)
    assert json.loads(capsys.readouterr().out)["usable"] is False


@pytest.mark.parametrize(("gpus", "trouble"), [(1, NO_DRIVER), (0, ABSENT)])
def test_a_transport_that_cannot_be_loaded_is_to_be_repaired(gpus: int, trouble: str) -> None:
    machine = Machine(list_gpus=lambda: [Gpu(0, "NVIDIA H200", 150 << 30, "580")] * gpus)
    finding = doctor.mooncake_library(machine, lambda code: trouble)
    assert finding.status is Status.fail
    assert trouble in finding.value


def test_hidden_gpus_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(i, "NVIDIA H200", 150 << 30, "580") for i in range(2)]
    machine = Machine(list_gpus=lambda: gpus, count_gpus=lambda: 1, read_topology=lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    finding = list(doctor.gpus_and_links(machine))[-1]
    assert finding.status is Status.warn
    assert "CUDA_VISIBLE_DEVICES='0' hides the others" in finding.advice


@pytest.mark.parametrize(("state", "status"), [("unknown", Status.ok), ("down", Status.fail)])
def test_a_loopback_that_is_down_is_to_be_brought_up(
    state: str, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "list_interfaces", lambda: {"lo": state, "eth0": "up", "eth1": "down"})
    *_, interfaces = doctor.networks(HERE)
    assert (interfaces.status, "ip link set lo up" in interfaces.advice) == (status, status is Status.fail)


def test_taken_port_names_a_free_one() -> None:
    finding = next(iter(doctor.ports_and_ray(Machine(is_port_free=lambda port: port == 8270))))
    assert finding.status is Status.note, "a run starts all the same"
    assert "8270" in finding.advice


def test_allocator_that_mooncake_cannot_register_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert Status.fail in [finding.status for finding in doctor.environment_variables(HERE)]


def test_variables_of_the_shell_are_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    machine = Machine(count_gpus=lambda: 0)
    (finding,) = [one for one in doctor.environment_variables(machine) if one.name == "OMP_NUM_THREADS"]
    assert finding.value == "16"
    assert finding.advice.startswith("kept; Slipstream's is 1")


@pytest.mark.parametrize(("status", "code"), [(Status.warn, 0), (Status.fail, 1)])
def test_exit_code_and_json(status: Status, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("limits", "open files", "10", status, "raise it")
    assert doctor.print_findings([finding], as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] == (code == 0)
    assert report["findings"][0]["status"] == status.value
    assert doctor.print_findings([finding], as_json=False) == code
    assert "raise it" in capsys.readouterr().out


def test_every_area_reports_on_this_machine() -> None:
    findings = list(doctor.gather(HERE, lambda code: None))  # the imports in child processes are slow
    assert {"python", "machine", "gpu", "network", "limits", "ray", "mooncake", "environment"} == {
        finding.area for finding in findings
    }
    assert all(finding.advice for finding in findings if finding.status in (Status.warn, Status.fail))


def test_a_child_that_dies_is_a_finding_not_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('rows of the user')\n")
    monkeypatch.chdir(tmp_path)
    assert doctor.trouble_in_child("import os; os.abort()") is not None
    assert doctor.trouble_in_child("raise RuntimeError('no driver')") == "RuntimeError: no driver"
    assert doctor.trouble_in_child("import json") is None


def test_a_run_that_goes_on_is_shown_with_its_token(short_tmpdir: Path) -> None:
    folder, lock = make_private_folder()
    (found,) = [finding for finding in doctor.ports_and_ray(HERE) if finding.name == "a run of yours"]
    assert found.advice.endswith(f"cat {folder.token}")
    os.close(lock)
    (found,) = [finding for finding in doctor.ports_and_ray(HERE) if finding.value == str(folder.root)]
    assert found.name == "folder of a dead run"
