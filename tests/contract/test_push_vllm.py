"""`slipstream push` against real `vllm serve` processes: what is on disk is what vLLM's own loader would have made.

The oracle loads the same folders by itself. The plugin is found as an installed package's is: by an entry point, here
in a folder that is made from pyproject.toml. (Servers that the command starts: test_push_fleet.py.)
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.held_port import held_port
from cases.pushing import SMALL, command, environment, held
from fakes.checkpoints import TINY, save_checkpoint
from fakes.readable_engine import READER
from fakes.vllm_oracle import vllm_loads
from safetensors.torch import load_file, save_file

from slipstream.rollout.errors import EngineError
from slipstream.rollout.served.client import Rendezvous, ServedEngine
from slipstream.rollout.served.serve import VLLM_MODULE
from slipstream.weight_sync.disk.safetensors_files import read_index, tensor_metas

pytest.importorskip("vllm")
REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 840.0
"""A little less than pytest gives a contract test: on a busy machine vLLM takes minutes to be imported."""
CHANGED = 0.02
"""Share of elements in which the checkpoints one and two differ."""
TWO_RANKS = ["--ranks", "2", "--delta-mib", "8", "--json"]
LOADED: dict[Path, dict[str, str]] = {}
"""What oracle() has loaded."""


def install_entry_points(folder: Path) -> None:
    """What pip would write for pyproject.toml's entry points."""
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "slipstream_rl-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream-rl\nVersion: 0.0.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def oracle(checkpoint: Path) -> dict[str, str]:
    """Hashes of every parameter after vLLM's own load."""
    if checkpoint not in LOADED:
        LOADED[checkpoint] = vllm_loads(checkpoint, "bfloat16")
    return LOADED[checkpoint]


class Server:
    """`vllm serve` as its user starts it: with the plugin, without our command."""

    def __init__(self, folder: Path, checkpoint: Path, port: int) -> None:
        install_entry_points(folder / "installed")
        self.engine = ServedEngine(f"http://127.0.0.1:{port}")
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *[sys.executable, "-m", VLLM_MODULE, "--model", str(checkpoint), "--port", str(port)],
                    *["--host", "127.0.0.1", "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"],
                    *["--served-model-name", "tiny", "--dtype", "bfloat16", *SMALL],
                    *["--weight-transfer-config", '{"backend": "slipstream"}'],
                    *["--worker-extension-cls", READER],
                ],
                env=environment(folder / "installed") | {"VLLM_SERVER_DEV_MODE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.engine.is_healthy():
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    save_checkpoint(folder / "one", TINY, seed=1)
    shutil.copytree(folder / "one", folder / "two")
    generator = torch.Generator().manual_seed(2)
    for file in (folder / "two").glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < CHANGED] += 1
        save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    oracle(folder / "one")  # and vLLM keeps what it learns of the class: a server would import all of it to look
    with held_port() as port:
        server = Server(folder, folder / "one", port)
        try:
            server.wait()
            yield server
        finally:
            server.close()


def push(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("push", *words), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def report_of(server: Server, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr + server.log.read_text()[-3000:]
    assert ".cpp:" not in done.stderr, "Mooncake's lines about its own start"
    return json.loads(done.stdout.splitlines()[-1])


def test_a_served_engine_holds_what_its_own_loader_makes_of_a_checkpoint(server: Server, folder: Path) -> None:
    """It does not hold the base that is named, so it gets every byte."""
    report = report_of(server, push(folder, "two", "--base", "one", "--to", server.engine.url, *TWO_RANKS))
    assert report["engines"] == {server.engine.url: ""}
    assert report["num_bytes"] == sum(file.stat().st_size for file in (folder / "two").glob("*.safetensors")) - sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in (folder / "two").glob("*.safetensors")
    )
    assert (report["publish"]["num_takers"], report["publish"]["changed_fraction"]) == (0, None)
    assert held(server.engine) == oracle(folder / "two")


def test_an_engine_that_holds_another_checkpoint_gets_what_differs(server: Server, folder: Path) -> None:
    report = report_of(server, push(folder, "one", "--base", "two", "--to", server.engine.url, *TWO_RANKS))
    assert held(server.engine) == oracle(folder / "one")
    assert report["publish"]["num_takers"] == report["num_engine_ranks"] == 1
    assert report["publish"]["changed_fraction"] == pytest.approx(CHANGED, rel=0.1)
    assert report["publish"]["num_bytes"] < 0.9 * report["num_bytes"], "CPU engines repack experts, which go whole"


def test_the_scripts_of_the_page_run_as_they_stand_there(server: Server, folder: Path) -> None:
    """The first halves the weights twice; the others send the checkpoint, the second one from two ranks."""
    scripts = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "push.md").read_text(), re.DOTALL)
    assert len(scripts) == 3
    for script, words in zip(
        scripts, ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []), strict=True
    ):
        text = script.replace("/models/Qwen3-30B-A3B", str(folder / "one"))
        (folder / "script.py").write_text(text.replace("http://127.0.0.1:8000", server.engine.url))
        done = subprocess.run(
            [sys.executable, *words, str(folder / "script.py")],
            cwd=folder, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + server.log.read_text()[-3000:]
        assert (held(server.engine) == oracle(folder / "one")) == (script is not scripts[0])


def test_an_update_that_fails_leaves_the_engine_paused_and_another_one_repairs_it(server: Server, folder: Path) -> None:
    tensors = tensor_metas(read_index(folder / "one", "x"))
    key = b"k" * 32
    rendezvous = Rendezvous(key, "127.0.0.1")
    try:
        with pytest.raises(EngineError, match=r"rank 0: RecordError: .*o_proj"):
            missing = [meta for meta in tensors if "layers.0.self_attn.o_proj" not in meta.name]
            server.engine.attach(missing, key, rendezvous, transport="tcp", timeout_s=300)
        (endpoint,) = server.engine.attach(tensors, key, rendezvous, transport="tcp", timeout_s=300)
    finally:
        rendezvous.close()
    assert endpoint.startswith("tcp://127.0.0.1:")
    server.engine.start()
    with pytest.raises(EngineError, match="500"):
        server.engine.finish()
    assert server.engine._request("GET", "/is_paused")["is_paused"]
    server.engine.abandon("nothing was sent")
    done = push(folder, "two", "--to", server.engine.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert held(server.engine) == oracle(folder / "two")
    assert not server.engine._request("GET", "/is_paused")["is_paused"]
