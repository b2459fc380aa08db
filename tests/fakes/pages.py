"""What the pages take for granted, small: a model's folder, an adapter, rows of every kind, a run with a checkpoint."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.errors import SlipstreamError
from slipstream.conf.load import load_run_config, resolved_yaml
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.data.sources import parse_hub_source
from slipstream.orchestrator.inputs import machine_checks, preflight, teacher_check
from slipstream.orchestrator.inputs.character_tokenizer import (
    ALPHABET,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    save_character_tokenizer,
)
from slipstream.orchestrator.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    r"/?models/[\w.-]+|/checkpoints/[\w.-]+|FOLDER|STUDENT|MODEL": "model",
    r"DIR": "adapter",
    r"runs/NAME": "runs/latest",
    r"ADDRESS": "127.0.0.1:6379",
    r"path/to/my_rewards\.py": "my_rewards.py",
}
"""Words of the pages that stand for something of the reader's -> what this session has."""
TINY: dict[str, Any] = {
    **load_run_config(["experiment=quickstart"]).model.hf_config,
    "vocab_size": len(SPECIAL_TOKENS) + len(ALPHABET),
    "max_position_embeddings": 40960,
}
TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
PLAIN = {"prompt": "4g7=", "answer": "g", "question": "4g7=", "reward_model": {"ground_truth": "g"}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "rl": [PLAIN, {**PLAIN, "prompt": "h22=", "answer": "h"}],
    "sft": [{"messages": TURNS}],
    "dpo": [{"prompt": "6d8=", "chosen": "d", "rejected": "8"}],
}
ENOUGH = Machine(
    count_gpus=lambda: 64,
    count_cpus=lambda: 64,
    memory_bytes=lambda: (1 << 40, 1 << 40),
    free_bytes=lambda folder: 1 << 40,
    is_port_free=lambda port: True,
)


class Begun(Exception):
    """A command would begin to work now."""


def dry_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where they would start something, and the machine is large; no service is asked."""

    def begin(*given: object, **named: object) -> None:
        raise Begun

    for place in (
        "slipstream.orchestrator.offline.estimate.plan_run",
        "slipstream.orchestrator.push.command.Push.__enter__",
        "slipstream.orchestrator.cli.doctor.run_doctor",
        "slipstream.orchestrator.view.command.run_view",
        "slipstream.orchestrator.control.stop_request.stop",
        "slipstream.orchestrator.control.control_folder.ask",
        "slipstream.orchestrator.cli.merge.merge",
    ):
        monkeypatch.setattr(place, begin)
    checked = preflight.run_preflight
    monkeypatch.setattr(preflight, "run_preflight", lambda config: checked(config, ENOUGH))
    monkeypatch.setattr(machine_checks, "answers", lambda host, port: True)
    monkeypatch.setattr(teacher_check, "check_teacher", lambda config: "a stand-in")


def rows_of(text: str) -> list[dict[str, Any]]:
    """JSON objects, one after the other."""
    decoder, rows, at = json.JSONDecoder(), [], 0
    while at < len(text):
        row, at = decoder.raw_decode(text, at)
        rows.append(row)
        at += len(text[at:]) - len(text[at:].lstrip())
    return rows


@dataclass
class Place:
    """The folder of a session, which is the working directory."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    known: dict[str, Any] = field(default_factory=dict)
    """What the page's Python has imported of ours."""
    written: set[str] = field(default_factory=set[str])
    """Files of the page."""

    def __post_init__(self) -> None:
        self.model()
        self.adapter(self.root / "adapter")
        self.run_folder()
        shutil.copytree(ROOT / "examples", self.root / "examples")

    def model(self) -> None:
        """A checkpoint of a small mixture of experts, whose template knows tools."""
        folder = self.root / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(TINY))
        tensors = read_config(TINY).checkpoint_tensors("float32")
        save_file({one.name: np.zeros(one.shape, np.float32) for one in tensors}, folder / "model.safetensors")
        save_character_tokenizer(folder, vocab_size=TINY["vocab_size"])
        (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}" + CHAT_TEMPLATE)

    @staticmethod
    def adapter(folder: Path) -> None:
        """An adapter of one matrix, in PEFT's format."""
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32.0}')
        heads = TINY["num_attention_heads"] * TINY["head_dim"]
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        shapes = {f"{name}A.weight": (16, TINY["hidden_size"]), f"{name}B.weight": (heads, 16)}
        tensors = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
        save_file(tensors, folder / "adapter_model.safetensors")

    def run_folder(self) -> None:
        """runs/latest: a run of that model with a checkpoint, which is its best."""
        root = self.root / "runs" / "latest"
        words = [*self.base([]), "data.eval_path=heldout.jsonl", "run.eval_every_steps=5", "run.num_steps=100"]
        config = load_run_config([*words, "cluster.device=cpu", "weight_sync.transport=auto"])
        self.make_data(" ".join(words))
        store = CheckpointStore(root / "checkpoints", keep=1, options=fingerprint(config))
        partial = store.begin(50)
        (partial / "trainer" / "rank-0.safetensors").write_bytes(bytes(100))
        self.adapter(partial / "adapter")
        store.finish(partial, RunState(50, 50, {"epoch": 0}, {}, BufferState(50)))
        (root / "checkpoints" / "best.json").write_text('{"step": 50}')
        (root / "config.yaml").write_text(resolved_yaml(config))

    def write(self, name: str, text: str) -> None:
        """A file of the page, also where its commands look for it in a package."""
        self.written.add(name)
        for path in (self.root / name, self.root / "my_package" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    @staticmethod
    def base(words: list[str]) -> list[str]:
        """What `...` of a page stands for: a model and, unless the words name them, rows."""
        named = " ".join(words)
        model = [] if re.search(r"experiment=|model=", named) else ["model=checkpoint"]
        model += [] if re.search(r"experiment=|model.path=", named) else ["model.path=FOLDER"]
        rows = [] if re.search(r"data\.(path|sources)=|experiment=", named) else ["data=files", "data.path=train.jsonl"]
        return [NAMES_RE.sub(_ours, word) for word in [*model, *rows]]

    def with_stand_ins(self, text: str) -> str:
        """The text with words of this session, and the data that it names."""
        for source in re.findall(r"hf:[\w/:.-]+", text):
            parse_hub_source(source)
            text = text.replace(source, f"{re.sub(r'[^a-z0-9]', '_', source)}.jsonl")
        return NAMES_RE.sub(_ours, text)

    def make_data(self, text: str) -> None:
        """Every file of rows that is named and that no page has written, of the kind that the run learns from."""
        kind = "dpo" if "algorithm=dpo" in text else "sft" if re.search("(algorithm|experiment)=sft", text) else "rl"
        for name in re.findall(r"[\w./-]+\.(?:jsonl|parquet)", text):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".parquet"):
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[kind]), path)
            elif name not in self.written:
                path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))

    def run_slipstream(self, words: list[str]) -> None:
        """Call `slipstream` up to where it would begin to work."""
        if "..." in words:
            at = words.index("...")
            words = [*words[:at], *self.base(words), *words[at + 1 :]]
        words = [self.with_stand_ins(word) for word in words]
        self.make_data(" ".join(words))
        if words[:1] and words[0] in ("train", "resume", "eval") and not {"--help", "--cfg", "--dry-run"} & set(words):
            words = [*words, "--dry-run"]
        try:
            code = main(words)
        except Begun:
            return
        assert code == 0, f"slipstream {' '.join(words)}"

    def check_row(self, row: dict[str, Any]) -> None:
        """One of the objectives takes the row."""
        (self.root / "row.jsonl").write_text(json.dumps(row) + "\n")
        words = ["model=checkpoint", "model.path=model", "data=files", "data.path=row.jsonl"]
        reward = "reward=code" if "tests" in row else "reward=exact_match" if "answer" in row else "reward=none"
        refusals = []
        for more in ([reward], ["algorithm=sft"], ["algorithm=dpo"]):
            try:
                preflight.check_data(load_run_config([*words, *more]))
            except SlipstreamError as error:
                refusals.append(str(error))
            else:
                return
        raise AssertionError(f"{json.dumps(row)}: no reader takes it: {refusals}")


NAMES_RE = re.compile("|".join(f"(?P<n{i}>(?<![\\w.]){name}(?![\\w]))" for i, name in enumerate(NAMES)))


def _ours(found: re.Match[str]) -> str:
    return list(NAMES.values())[int((found.lastgroup or "n0")[1:])]
