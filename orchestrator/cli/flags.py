"""Flags of every command, declared once: argparse reads them, and `--help` is written from them.

Owns: names, types, help and, where nothing else has them, defaults. Defaults of `push` and `plan` are those of
PushOptions, Hardware and LinkRates. Does not own: what the flags mean (the commands), texts around them (help.py),
options of a run (conf/).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from conf.errors import ConfigError
from orchestrator.cli import help as texts
from orchestrator.cli.help import CommandText

_IN_OUR_WORDS = {
    r"^argument (\S+): invalid int value: ": r"\1 must be an integer, got ",
    r"^argument (\S+): invalid float value: ": r"\1 must be a number, got ",
    r"^argument (\S+): invalid choice: (.*) \(choose from (.*)\)$": r"\1 must be one of \3, got \2",
    r"^argument (\S+): expected one argument$": r"\1 needs a value",
    r"^unrecognized arguments: (-\S+).*": r"unknown flag \1",
    r"^unrecognized arguments: (\S+).*": r"unexpected word '\1'",
}
"""What argparse says of a mistake -> what `slipstream` says."""


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ConfigErrors, so that they look like every other mistake."""

    def __init__(self, text: CommandText, *, has_topics: bool = False) -> None:
        super().__init__(
            prog=f"slipstream {text.command}",
            usage=text.usage,
            description=text.about,
            epilog=text.end,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
        )
        if not has_topics:
            self.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        from conf.options import did_you_mean

        for pattern, words in _IN_OUR_WORDS.items():
            message = re.sub(pattern, words, message)
        hint = (
            did_you_mean(message.split()[-1], self._option_string_actions) if message.startswith("unknown flag") else ""
        )
        raise ConfigError(f"{message}. {hint or f'See: {self.prog} --help'}")

    def read_overrides(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Flags, and the words that are overrides. A misspelled flag is neither."""
        flags, overrides = self.parse_known_args(words)
        for word in overrides:
            if word.startswith("--") and difflib.get_close_matches(word, self._option_string_actions, cutoff=0.75):
                self.error(f"unknown flag {word}")
        return flags, overrides


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, and flags folded beside them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=texts.width())


def train() -> Parser:
    """Flags of `slipstream train`."""
    parser = Parser(texts.TRAIN, has_topics=True)
    flags = parser.add_argument_group("flags")
    flags.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        dest="help_topic",
        metavar="TOPIC",
        help="a section (trainer), an option (trainer.ep_size), a group (experiment), or: options",
    )
    _start_nothing(flags.add_argument)
    flags.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with YAML files of your own")
    return parser


def resume() -> Parser:
    """Flags of `slipstream resume`."""
    parser = Parser(texts.RESUME)
    parser.add_argument("run", type=Path, nargs="?", help=argparse.SUPPRESS)
    _start_nothing(parser.add_argument_group("flags").add_argument)
    return parser


def stop() -> Parser:
    """Flags of `slipstream stop`."""
    from orchestrator.control.stop_request import STOP_TIMEOUT_S

    parser = Parser(texts.STOP)
    parser.add_argument("run", type=Path, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument_group("flags").add_argument(
        "--timeout-s",
        type=float,
        default=STOP_TIMEOUT_S,
        metavar="S",
        help="longest wait for the end; default %(default)g",
    )
    return parser


def _start_nothing(add: Callable[..., object]) -> None:
    add("--cfg", choices=["job"], help="print every option of this run with its value, as YAML; starts nothing")
    add("--dry-run", action="store_true", help="check options, machine and files; starts nothing")


def launch() -> Parser:
    """Flags of `slipstream launch`; their destinations are the fields of LaunchOptions."""
    from orchestrator.launch.launch_options import DEFAULT_IMAGE, LaunchOptions
    from orchestrator.launch.skypilot import DEFAULT_GPU

    parser = Parser(texts.LAUNCH)
    parser.set_defaults(**_defaults(LaunchOptions))
    parser.add_argument("target", nargs="?", help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags: machines")
    flags.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a machine; default %(default)s")
    flags.add_argument(
        "--gpu-type",
        metavar="NAME",
        help=f"of GPU: SkyPilot's name ({DEFAULT_GPU}), SLURM's type of GPU, or the value of Kubernetes' label "
        "nvidia.com/gpu.product",
    )
    flags.add_argument("--cpus-per-gpu", type=int, metavar="N", help="cores for each GPU; default %(default)s")
    flags.add_argument("--memory-gib-per-gpu", type=int, metavar="N", help="memory for each GPU; default %(default)s")
    flags = parser.add_argument_group("flags: SLURM")
    flags.add_argument(
        "--time-limit", metavar="[D-]HH:MM:SS", help="of one stretch of the job; default: the partition's"
    )
    flags.add_argument(
        "--venv", type=Path, metavar="DIR", help="the environment with Slipstream, on every machine; default: this one"
    )
    flags = parser.add_argument_group("flags: KubeRay and SkyPilot")
    flags.add_argument("--image", metavar="IMAGE", help=f"built from docker/gpu.Dockerfile; default {DEFAULT_IMAGE}")
    flags.add_argument(
        "--volume",
        metavar="NAME",
        help="with models, data and run folders: a PersistentVolumeClaim, or a volume of SkyPilot",
    )
    flags.add_argument("--mount", type=PurePosixPath, metavar="DIR", help="where machines see it; default %(default)s")
    flags.add_argument("--namespace", metavar="NAME", help="KubeRay: of the job; default: kubectl's own")
    flags = parser.add_argument_group("flags: what comes out")
    flags.add_argument("--name", metavar="NAME", help="of the job; default: run.name")
    flags.add_argument("--output", type=Path, metavar="FILE", help="where the file goes; default: the screen")
    flags.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with YAML files of your own")
    return parser


def plan() -> Parser:
    """Flags of `slipstream plan`."""
    from orchestrator.offline.hardware import Hardware
    from weight_sync.prediction.links import LinkRates

    default, rates = _defaults(Hardware), LinkRates()
    parser = Parser(texts.PLAN)
    flags = parser.add_argument_group("flags: the cluster")
    flags.add_argument(
        "--ranks-per-node",
        type=int,
        default=default["ranks_per_node"],
        metavar="N",
        help="GPUs of a node, default %(default)s; trainer ranks fill nodes first, then the engines",
    )
    for name, rate, meaning in (
        ("nic", rates.nic_bytes_s, "one NIC per GPU, each direction, 10^9 bytes/s"),
        ("nvlink", rates.nvlink_bytes_s, "one-sided writes inside a node"),
        ("hbm", rates.hbm_bytes_s, "device memory traffic of packing, merging and hashing"),
    ):
        flags.add_argument(f"--{name}-gb-s", type=float, metavar="RATE", help=f"{meaning}; default {rate / 1e9:g}")
    flags.add_argument(
        "--op-us",
        type=float,
        metavar="MICROSECONDS",
        help=f"one entry of a batched write, beside its bytes; default {rates.op_s * 1e6:g}",
    )
    flags.add_argument(
        "--adapter-decode-loss",
        type=float,
        default=default["adapter_decode_loss"],
        metavar="F",
        help="part of its decode speed that an engine loses by serving an expert adapter; default %(default)s, of vLLM "
        "0.25.1 (bench/adapter_sync.py)",
    )
    flags.add_argument(
        "--changed",
        type=float,
        default=default["changed"],
        metavar="F",
        help="with weight_sync.delta_bytes: share of the elements that change in a step; default %(default)s",
    )
    flags.add_argument(
        "--slow-rank",
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help="a trainer rank whose links and memory are FACTOR times slower; may be given again",
    )
    flags.add_argument(
        "--lost-nic",
        type=int,
        action="append",
        default=[],
        metavar="GPU",
        help="a GPU without a NIC, which shares its neighbour's; may be given again",
    )
    flags = parser.add_argument_group("flags: what comes out")
    flags.add_argument(
        "--output",
        type=Path,
        default=Path("plan"),
        metavar="DIR",
        help="where timeline.png goes; default %(default)s",
    )
    flags.add_argument("--json", action="store_true", help="the same figures for programs")
    _layout_cache(flags.add_argument)
    flags.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with YAML files of your own")
    return parser


def push() -> Parser:
    """Flags of `slipstream push`; their destinations are the fields of PushOptions."""
    from orchestrator.push.push_options import PushOptions

    parser = Parser(texts.PUSH)
    parser.set_defaults(**_defaults(PushOptions))
    parser.add_argument("checkpoint", nargs="?", type=Path, help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags: engines to start")
    flags.add_argument(
        "--start", type=int, metavar="N", help="how many; they live until this command ends (Ctrl-C), unless --once"
    )
    flags.add_argument("--tp", type=int, dest="tp_size", metavar="N", help="GPUs of one engine; default %(default)s")
    flags.add_argument(
        "--expert-parallel",
        action="store_true",
        dest="enable_expert_parallel",
        help="whole experts on every GPU of an engine",
    )
    flags.add_argument("--dtype", help="of the engine's weights; default %(default)s: the checkpoint's")
    flags.add_argument("--host", help="address of the engines' API; default %(default)s")
    flags.add_argument(
        "--port",
        type=int,
        help="port of the first engine's API, the others count on; without it the first that are free from 8000 on",
    )
    flags.add_argument("--start-timeout-s", type=float, metavar="S", help="longest start; default %(default)g")
    flags.add_argument("--log-dir", type=Path, metavar="DIR", help="what the engines say; default %(default)s")
    flags = parser.add_argument_group("flags: the publish")
    flags.add_argument(
        "--to", action="append", default=[], metavar="URL[,URL...]", help="engines that run; may be given again"
    )
    flags.add_argument(
        "--ranks",
        type=int,
        dest="num_ranks",
        metavar="N",
        help="processes that read and send; default: one for each GPU in use, 1 on CPUs",
    )
    flags.add_argument(
        "--threads", type=int, dest="num_threads", metavar="N", help="that read, in each rank; default %(default)s"
    )
    flags.add_argument(
        "--transport",
        choices=["auto", "nvlink", "rdma", "tcp"],
        metavar="LINK",
        help="auto, nvlink, rdma, tcp; default %(default)s",
    )
    flags.add_argument(
        "--watermark-mib",
        type=int,
        metavar="N",
        help="most temporary memory of a rank on its GPU; default %(default)s",
    )
    flags.add_argument(
        "--timeout-s",
        type=float,
        metavar="S",
        help="deadline of one publish to one engine, and of one request to it; default %(default)g",
    )
    flags = parser.add_argument_group("flags: the end")
    flags.add_argument("--once", action="store_true", help="end after the publish, and the started engines with it")
    flags.add_argument("--json", action="store_true", help="the report for programs, as one line")
    return parser


def parity() -> Parser:
    """Flags of `slipstream parity`; their destinations are the fields of ParityOptions."""
    from orchestrator.parity.command import ParityOptions

    parser = Parser(texts.PARITY)
    parser.set_defaults(**_defaults(ParityOptions))
    flags = parser.add_argument_group("flags: what is sampled")
    flags.add_argument(
        "--prompts", type=int, dest="num_prompts", metavar="N", help="of data.path, else random; default %(default)s"
    )
    flags.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="length of a random prompt, most of a given one; default %(default)s",
    )
    flags.add_argument("--max-tokens", type=int, metavar="N", help="sampled after each prompt; default %(default)s")
    flags = parser.add_argument_group("flags: what is compared")
    flags.add_argument(
        "--layer-prompts",
        type=int,
        dest="num_layer_prompts",
        metavar="N",
        help="sequences whose operations are compared, held in memory whole; default %(default)s",
    )
    flags.add_argument("--transformers", action="store_true", help="score with transformers, too")
    flags.add_argument(
        "--usual",
        type=Path,
        metavar="FILE",
        help="parity.json of an earlier call on the same machine: name what differs more than it did then",
    )
    flags = parser.add_argument_group("flags: what comes out")
    flags.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where parity.json, parity.png and engine.log go; default %(default)s",
    )
    flags.add_argument("--json", action="store_true", help="the same figures for programs")
    flags.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with YAML files of your own")
    return parser


def record() -> Parser:
    """Flags of `slipstream record`."""
    parser = Parser(texts.RECORD)
    parser.add_argument("model", nargs="?", type=Path, help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags")
    flags.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of the engine; default %(default)s")
    flags.add_argument("--expert-parallel", action="store_true", help="whole experts on every rank")
    flags.add_argument("--dtype", default="bfloat16", help="of the engine's weights; default %(default)s")
    flags.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        metavar="KIND",
        help="cuda or cpu: kind of device that the engine would run on; default %(default)s",
    )
    flags.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write the layouts there (weight_sync.record.layout_wire reads them)",
    )
    _layout_cache(flags.add_argument)
    flags.add_argument("--json", action="store_true", help="the same for programs")
    return parser


def _layout_cache(add: Callable[..., object]) -> None:
    add(
        "--layout-cache",
        type=Path,
        metavar="DIR",
        help="where recorded engine layouts are kept; default ~/.cache/slipstream/layouts",
    )


def doctor() -> Parser:
    """Flags of `slipstream doctor`."""
    parser = Parser(texts.DOCTOR)
    parser.add_argument_group("flags").add_argument(
        "--json", action="store_true", help="the same findings for programs"
    )
    return parser


def evaluate() -> Parser:
    """Flags of `slipstream eval`."""
    parser = Parser(texts.EVAL)
    flags = parser.add_argument_group("flags")
    flags.add_argument("--checkpoint", metavar="C", help="newest, best (run.keep_best) or a step; default newest")
    flags.add_argument(
        "--adapter", type=Path, metavar="DIR", help="an adapter in PEFT's format, in place of RUN's or beside MODEL"
    )
    flags.add_argument("--json", action="store_true", help="the table for programs")
    _start_nothing(flags.add_argument)
    return parser


def merge() -> Parser:
    """Flags of `slipstream merge`."""
    parser = Parser(texts.MERGE)
    parser.add_argument("run", type=Path, nargs="?", help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags")
    flags.add_argument(
        "--checkpoint",
        default="newest",
        metavar="C",
        help="newest, best (run.keep_best) or a step; default %(default)s",
    )
    flags.add_argument("--output", type=Path, metavar="DIR", help="a folder that is not there yet; RUN/merged")
    return parser


def status() -> Parser:
    """Flags of `slipstream status`."""
    parser = Parser(texts.STATUS)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/latest"), help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags")
    flags.add_argument("--json", action="store_true", help="the same for programs")
    flags.add_argument("--curves", action="store_true", help="draw RUN/curves.png from the rows so far")
    return parser


def view() -> Parser:
    """Flags of `slipstream view`."""
    parser = Parser(texts.VIEW)
    parser.add_argument("runs", type=Path, nargs="*", help=argparse.SUPPRESS)
    flags = parser.add_argument_group("flags")
    flags.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1; default: any that is free")
    flags.add_argument(
        "--export", type=Path, metavar="FILE.html", help="write one file that any browser opens, and serve nothing"
    )
    return parser


def recover() -> Parser:
    """Flags of `slipstream recover`."""
    parser = Parser(texts.RECOVER)
    parser.add_argument("run", type=Path, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument_group("flags").add_argument(
        "--worker",
        type=int,
        metavar="N",
        help="this worker, whatever its state; without it: every worker that is out of service",
    )
    return parser


def _defaults(cls: Any) -> dict[str, Any]:
    """Field -> default of a dataclass, of those that have a plain one."""
    return {item.name: item.default for item in dataclasses.fields(cls) if item.default is not dataclasses.MISSING}
