"""`slipstream push` and `record` answer mistakes with one message and start nothing."""

import contextlib
import itertools
import json
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.checkpoints import TINY, save_checkpoint

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.machine import Machine
from slipstream.orchestrator.offline import record as record_command
from slipstream.orchestrator.push import engine_starts
from slipstream.orchestrator.push.command import Push
from slipstream.orchestrator.push.push_options import PushOptions, addresses
from slipstream.rollout.layouts.offline_layout import LayoutRequest
from slipstream.rollout.served.servers import SERVER_MODULE, ServerOptions, serve_command, server_environment
from slipstream.weight_sync.layout import DestLayout, Param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, TINY, seed=0)
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a rank was started")

    def refuse_servers(command: list[str], *args: Any, **options: Any) -> Any:
        if SERVER_MODULE in command:
            pytest.fail("an engine was started")
        return popen(command, *args, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse_servers)
    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refuse)


def message(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "either --start N"),
        (["--start", "1", "--to", "http://a:1"], "either --start N"),
        (["--start", "-1"], "--start must be >= 1, got -1"),
        (["--start", "1", "--tp", "0"], "--tp must be >= 1, got 0"),
        (["--start", "1", "--tp", "3"], "--tp=3 does not divide the model's 4 attention heads; it can be 1, 2, 4"),
        (["--start", "100000"], "--start 100000 with --tp 1 needs "),  # memory, or GPUs
        (["--start", "1", "--ranks", "0"], "--ranks must be >= 1, got 0"),
        (["--start", "1", "--timeout-s", "0"], "--timeout-s must be > 0 and finite, got 0"),
        (["--start", "2", "--port", "65535"], "--port 65535: engines take one port each from there"),
        (["--start", "1", "--host", "nowhere.invalid"], "--host nowhere.invalid is no address of this machine"),
        (["--to", "http://nowhere.invalid:8000"], "--to http://nowhere.invalid:8000: there is no host"),
        (["--to", "ftp://x"], "addresses of vLLM servers such as http://127.0.0.1:8000, got 'ftp://x'"),
        (["--to", "http://127.0.0.1:8000/v1"], "addresses of vLLM servers"),
        (["--to", "http://127.0.0.1:8000", "--tp", "2"], "--tp, --expert-parallel"),
        (["--to", "http://127.0.0.1:8000/?model=x"], "addresses of vLLM servers"),
        (["--to", "http://127.0.0.1:0"], "addresses of vLLM servers"),
        (["--to", "[::1"], "addresses of vLLM servers such as http://127.0.0.1:8000, got '[::1'"),
        (["--to", "[::1]:8000"], "--to http://[::1]:8000: there is no host '::1' with an address of IPv4, over which"),
        (["--to", "127.0.0.1:1,127.0.0.1:2", "--to", "http://127.0.0.1:1/"], "an engine twice: http://127.0.0.1:1\n"),
        (["--start", "1", "--watermark-mib", "0"], "--watermark-mib"),
        (["--to", "http://127.0.0.1:8000", "--delta-mib", "0"], "--delta-mib must be >= 1, got 0"),
        (["--to", "http://127.0.0.1:8000", "--delta-mib", "64"], "--delta-mib has no effect without --base"),
        (["--start", "1", "--base", "old"], "--base is what running engines (--to) hold"),
        (["--start", "x"], "--start must be an integer, got 'x'. See: slipstream push --help"),
        (["--start", "1", "--transport", "x"], "--transport must be one of 'auto', 'nvlink', 'rdma', 'tcp', got 'x'"),
        (["--start", "1", "--log-dir", "/dev/null/logs"], "--log-dir=/dev/null/logs cannot be made"),
        (["--strat", "1"], "unknown flag --strat. Did you mean --start"),
        (["--start"], "--start needs a value"),
        (["elsewhere", "--start", "1"], "unexpected word 'elsewhere'"),
    ],
)
def test_wrong_flags_are_named(
    words: list[str], expected: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in message(["push", str(checkpoint), *words], capsys) + "\n"


@pytest.mark.parametrize(
    "address",
    [
        "me:swordfish@127.0.0.1:1",
        "https://127.0.0.1:1,https://me:swordfish@127.0.0.1:1",
        "http://me:swordfish@127.0.0.1:1/v1",
        "ftp://me:swordfish@127.0.0.1",
        "me:swordfish@nowhere.invalid",
        "http://me:sword/fish@127.0.0.1:1",
        "http://me:1?fish@127.0.0.1:1",
        "http://me:cat,fish@127.0.0.1:1",
        "me:cat,1,fi/sh@127.0.0.1:1",
        "127.0.0.1:1,me:swordfish@127.0.0.1:2",
    ],
)
def test_no_message_tells_the_password_of_an_address(
    address: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(checkpoint), "--to", address]) != 0
    said = capsys.readouterr().err
    assert "--to" in said and "fish" not in said and "cat" not in said and "me:" not in said


@pytest.mark.parametrize(
    ("address", "cure"),
    [
        ("http://me:cat,fish@127.0.0.1:1", "a comma in a user or a password is written %2C"),
        ("127.0.0.1:1,me:swordfish@127.0.0.1:2", "begins with http:// or https://"),
        ("http://me:sword/fish@127.0.0.1:1", "/ in a user or a password is written %2F, ? %3F and # %23"),
    ],
)
def test_a_login_that_cannot_be_read_is_refused_with_how_to_write_it(
    address: str, cure: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cure in message(["push", str(checkpoint), "--to", address], capsys)


def test_addresses_of_one_flag_are_parted_by_commas_and_logins_stay_with_theirs() -> None:
    one, other = "http://me:cat%2Cfish@a:1", "https://me:x@b:2"
    assert addresses([f"{one},{other},", "me:x@c:3,d:4"]) == (one, other, "me:x@c:3", "d:4")


@pytest.mark.parametrize(("transport", "lacks"), [("nvlink", "usable GPU"), ("rdma", "RDMA device")])
def test_a_link_that_the_machine_lacks_is_named(transport: str, lacks: str, checkpoint: Path) -> None:
    machine = Machine(count_gpus=lambda: 0, list_rdma_nics=list)
    with pytest.raises(ConfigError, match=f"--transport {transport}: this machine has no {lacks}"):
        Push(PushOptions(checkpoint=checkpoint, start=1, transport=transport), machine=machine)


def test_wrong_checkpoints_are_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "push needs a CHECKPOINT" in message(["push", "--start", "1"], capsys)
    assert "has no config.json" in message(["push", str(tmp_path), "--start", "1"], capsys)
    assert "Qwen/Qwen3-0.6B: no such folder" in message(["push", "Qwen/Qwen3-0.6B", "--start", "1"], capsys)
    for command in (["push", str(tmp_path), "--start", "1"], ["record", str(tmp_path)]):
        (tmp_path / "config.json").write_text("[]")
        assert "config.json must hold a JSON object, got a list" in message(command, capsys)
        (tmp_path / "config.json").write_text("{")
        assert "config.json is not JSON" in message(command, capsys)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert "holds no .safetensors file" in message(["push", str(tmp_path), "--start", "1"], capsys)
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    (tmp_path / file.name).write_bytes(file.read_bytes()[:-1])
    assert "is cut short" in message(["push", str(tmp_path), "--start", "1"], capsys)


def test_a_base_of_another_model_is_named(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["push", str(checkpoint), "--to", "http://127.0.0.1:8000", "--base"]
    assert "--base=" in message([*words, str(tmp_path)], capsys)
    save_checkpoint(tmp_path / "wider", {**TINY, "moe_intermediate_size": 2 * TINY["moe_intermediate_size"]}, seed=0)
    save_checkpoint(tmp_path / "deeper", {**TINY, "num_hidden_layers": 3}, seed=0)
    for name in ("wider", "deeper"):
        text = message([*words, str(tmp_path / name)], capsys)
        assert f"--base={tmp_path / name} is of another model than CHECKPOINT (model.layers." in text
        assert " instead of " in text and "leave --base out to send every byte" in text


def test_a_taken_port_is_named(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = message(["push", str(checkpoint), "--start", "1", "--port", str(port)], capsys)
    assert f"port {port} is taken" in text


def test_engines_without_a_port_take_the_first_free_ones(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_starts, "is_port_free", lambda port, host: port not in (8000, 8002))
    monkeypatch.setattr(
        engine_starts, "ServerProcess", lambda common, port, gpus, log: SimpleNamespace(port=port, stop=list)
    )
    options = PushOptions(checkpoint=checkpoint, start=2, log_dir=tmp_path / "logs")
    with contextlib.ExitStack() as cleanup:
        servers = engine_starts.start_servers(options, Device.cpu, (), cleanup)
    ports: list[Any] = list(servers)
    assert [server.port for server in ports] == [8001, 8003]


def test_an_engine_that_is_not_there_ends_with_code_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["push", str(checkpoint), "--to", f"http://127.0.0.1:{port}"]) == 1
    shown = capsys.readouterr().err
    assert f"--to http://127.0.0.1:{port}: no engine answers there" in shown
    assert "Traceback" not in shown


def test_a_server_starts_with_dummy_weights_our_backend_and_the_users_words_last(checkpoint: Path) -> None:
    from slipstream.conf.schema import Device

    options = ServerOptions(
        checkpoint, Device.cuda, tp_size=2, enable_expert_parallel=True, extra=("--dtype", "float16")
    )
    words = serve_command(options, 8001)
    pairs = dict(itertools.pairwise(words))
    assert pairs["--load-format"] == "dummy"
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "slipstream"}
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--moe-backend"] == "triton"
    assert words[-2:] == ["--dtype", "float16"]
    assert "--skip-tokenizer-init" in words
    environment = server_environment(Device.cuda, ["2", "3"], {"PYTHONPATH": "/theirs", "VLLM_SERVER_DEV_MODE": "0"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PYTHONPATH"].endswith(":/theirs")


def test_record_reports_digests_sizes_and_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = tuple(DestLayout(rank, (Param("w", (4, 8), "bfloat16"),), ()) for rank in range(2))
    asked: list[Any] = []

    def recorded(request: LayoutRequest, _cache: Path | None) -> tuple[DestLayout, ...]:
        asked.append((len(request.tensors), request.tp_size, request.enable_expert_parallel))
        return layouts

    monkeypatch.setattr(record_command, "offline_layouts", recorded)
    monkeypatch.setattr(record_command, "engine_version", lambda: "vllm 0")
    monkeypatch.setattr(LayoutRequest, "file", lambda *_: tmp_path / "x.layouts")
    words = ["record", str(checkpoint), "--tp", "2", "--expert-parallel", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["digest"] == record_command.layouts_digest(layouts)
    assert [rank["num_bytes"] for rank in report["ranks"]] == [64, 64]
    assert not report["was_cached"]
    assert main(words) == 0
    assert report["digest"] in capsys.readouterr().out
    assert asked[0][1:] == (2, True)
    assert asked[0][0] == report["num_tensors"] > 30
    assert (tmp_path / "out").stat().st_size > 0
    assert "MODEL=" in message(["record", str(tmp_path / "nowhere")], capsys)
    assert "--tp=3 does not divide" in message(["record", str(checkpoint), "--tp", "3"], capsys)
    assert "--tp must be >= 1" in message(["record", str(checkpoint), "--tp", "0"], capsys)
    assert "--dtype must be one of" in message(["record", str(checkpoint), "--dtype", "int3"], capsys)
