"""Flags of every command, declared once: argparse reads them, and `--help` is written from them.

Owns: names, types, help and, where nothing else has them, defaults. Defaults of `push` and `plan` are those of
PushOptions, Hardware and LinkRates. Does not own: what the flags mean (the commands), texts around them (texts.py),
options of a run (conf/).
"""

import argparse
import dataclasses
import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cli import option_help, texts

Options = TypeVar("Options")
Add = Callable[..., None]
"""Adds one flag: (its names, its value's type, or bool if it takes none, the value's name, text, more of argparse)."""

_IN_OUR_WORDS = {
    r"^argument (\S+): invalid (?:int|count) value: ": r"\1 must be an integer, got ",
    r"^argument (\S+): invalid (?:float|positive) value: ": r"\1 must be a number, got ",
    r"^argument (\S+): must be": r"\1 must be",
    r"^argument (\S+): invalid choice: (.*) \(choose from (.*)\)$": r"\1 must be one of \3, got \2",
    r"^argument (\S+): expected one argument$": r"\1 needs a value",
    r"^unrecognized arguments: (-\S+).*": r"unknown flag \1",
    r"^unrecognized arguments: (\S+).*": r"unexpected word '\1'",
}
"""What argparse says of a mistake -> what `slipstream` says."""


_CONFIG_DIR = "a folder with YAML files of your own"
_LAYOUT_CACHE = "where recorded engine layouts are kept; default ~/.cache/slipstream/layouts"
_CHECKPOINT = "newest, best (run.keep_best) or a step; default"


def count(word: str) -> int:
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {word}")
    return number


def positive(word: str) -> float:
    if not 0 < (number := float(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be > 0 and finite, got {word}")
    return number


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ConfigErrors, so that they look like every other mistake.

    Args:
        text: Of texts.py, whose usage line explains the positional words.
        words: Name -> type of each positional word, none of which argparse asks for.
    """

    def __init__(self, text: str, *, has_topics: bool = False, **words: type) -> None:
        usage, _, about = text.partition("\n\n")
        about, _, end = about.partition("\n{flags}\n")
        super().__init__(
            prog=" ".join(usage.split()[:2]),
            usage=usage,
            description=about,
            epilog=end,
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
        )
        if not has_topics:
            self.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
        for name, kind in words.items():
            self.add_argument(name, type=kind, nargs="?", help=argparse.SUPPRESS)

    def example(self) -> str:
        """The first example of the command's help, a whole command without what follows it."""
        lines = (line.strip() for line in (self.description or "").splitlines())
        first = next(line for line in lines if line.startswith(f"{self.prog} "))
        return re.split(r"  +| && ", first)[0]

    def flags(self, title: str = "flags") -> Add:
        """Begin a group of flags. Returns what adds one to it."""
        add = self.add_argument_group(title).add_argument

        def flag(names: str, takes: Any, metavar: str | None, text: str, **more: Any) -> None:
            own: dict[str, Any] = {"action": "store_true"} if takes is bool else {"type": takes, "metavar": metavar}
            add(*names.split(), help=text, **own, **more)

        return flag

    def error(self, message: str) -> NoReturn:
        from slipstream.conf.options import did_you_mean

        for pattern, words in _IN_OUR_WORDS.items():
            message = re.sub(pattern, words, message)
        hint = (
            did_you_mean(message.split()[-1], self._option_string_actions) if message.startswith("unknown flag") else ""
        )
        raise ConfigError(f"{message}. {hint or f'See: {self.prog} --help'}")

    def read_overrides(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Flags, and the words that are overrides. A misspelled flag is neither."""
        flags, overrides = self.parse_known_args([word for word in words if word != "--"])  # it parts nothing here
        for word in overrides:
            if word.startswith("--") and difflib.get_close_matches(word, self._option_string_actions, cutoff=0.75):
                self.error(f"unknown flag {word}")
        return flags, overrides


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, and flags folded beside them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=option_help.width())


def train() -> Parser:
    parser = Parser(texts.TRAIN, has_topics=True)
    flag = parser.flags()
    topic = "a section (trainer), an option (trainer.ep_size), a group (experiment), or: options"
    flag("-h --help", str, "TOPIC", topic, nargs="?", const="", dest="help_topic")
    _start_nothing(flag)
    flag("--config-dir", Path, "DIR", _CONFIG_DIR)
    return parser


def resume() -> Parser:
    parser = Parser(texts.RESUME, run=str)
    _start_nothing(parser.flags())
    return parser


def stop() -> Parser:
    from slipstream.orchestrator.control.stop_request import STOP_TIMEOUT_S

    parser = Parser(texts.STOP, run=Path)
    flag = parser.flags()
    flag("--timeout-s", positive, "S", "longest wait for the end; default %(default)g", default=STOP_TIMEOUT_S)
    return parser


def launch() -> Parser:
    from slipstream.orchestrator.launch.command import DEFAULT_GPU, DEFAULT_IMAGE, LaunchOptions

    parser = Parser(texts.LAUNCH, target=str)
    parser.set_defaults(**_defaults(LaunchOptions))
    flag = parser.flags("flags: machines")
    flag("--gpus-per-node", count, "N", "GPUs of a machine; default %(default)s")
    kinds = f"SkyPilot's name ({DEFAULT_GPU}), SLURM's type of GPU, or the value of Kubernetes' label"
    flag("--gpu-type", str, "NAME", f"of GPU: {kinds} nvidia.com/gpu.product")
    flag("--cpus-per-gpu", count, "N", "cores for each GPU; default %(default)s")
    flag("--memory-gib-per-gpu", count, "N", "memory for each GPU; default %(default)s")
    flag = parser.flags("flags: SLURM")
    flag("--time-limit", str, "[D-]HH:MM:SS", "of one stretch of the job; default: the partition's")
    flag("--venv", Path, "DIR", "the environment with Slipstream, on every machine; default: this one")
    flag = parser.flags("flags: KubeRay and SkyPilot")
    flag("--image", str, "IMAGE", f"built from docker/gpu.Dockerfile; default {DEFAULT_IMAGE}")
    volume = "with models, data and run folders: a PersistentVolumeClaim, or a volume of SkyPilot"
    flag("--volume", str, "NAME", volume)
    flag("--mount", PurePosixPath, "DIR", "where machines see it; default %(default)s")
    flag("--namespace", str, "NAME", "KubeRay: of the job; default: kubectl's own")
    flag = parser.flags("flags: what comes out")
    flag("--name", str, "NAME", "of the job; default: run.name")
    flag("--output", Path, "FILE", "where the file goes; default: the screen")
    flag("--config-dir", Path, "DIR", _CONFIG_DIR)
    return parser


def plan() -> Parser:
    from slipstream.orchestrator.offline.hardware import CHANGED, CHANGED_FP8, Hardware
    from slipstream.weight_sync.prediction.links import LinkRates

    rates = LinkRates()
    parser = Parser(texts.PLAN)
    parser.set_defaults(**_defaults(Hardware))
    flag = parser.flags("flags: the cluster")
    nodes = "GPUs of a node, default %(default)s; trainer ranks fill nodes first, then the engines"
    flag("--ranks-per-node", count, "N", nodes)
    for name, rate, meaning in (
        ("nic", rates.nic_bytes_s, "one NIC per GPU, each direction, 10^9 bytes/s"),
        ("nvlink", rates.nvlink_bytes_s, "one-sided writes inside a node"),
        ("hbm", rates.hbm_bytes_s, "device memory traffic of packing, merging and hashing"),
    ):
        flag(f"--{name}-gb-s", positive, "RATE", f"{meaning}; default %(default)g", default=rate / 1e9)
    changed = f"share of the elements that change in a step; default {CHANGED:g}, for block-FP8 engines {CHANGED_FP8:g}"
    flag("--changed", float, "F", f"with weight_sync.delta_bytes: {changed}")
    slow = "a trainer rank whose links and memory are FACTOR times slower; may be given again"
    flag("--slow-rank", str, "RANK=FACTOR", slow, action="append", default=[])
    flag = parser.flags("flags: what comes out")
    flag("--output", Path, "DIR", "where timeline.png goes; default %(default)s", default=Path("plan"))
    flag("--json", bool, None, "the same figures for programs")
    flag("--layout-cache", Path, "DIR", _LAYOUT_CACHE)
    flag("--config-dir", Path, "DIR", _CONFIG_DIR)
    return parser


def push() -> Parser:
    from slipstream.orchestrator.push.push_options import DELTA_MIB, PushOptions

    parser = Parser(texts.PUSH, checkpoint=Path)
    parser.set_defaults(**_defaults(PushOptions))
    flag = parser.flags("flags: engines to start")
    flag("--start", count, "N", "how many; they live until this command ends (Ctrl-C), unless --once")
    flag("--tp", count, "N", "GPUs of one engine; default %(default)s", dest="tp_size")
    flag("--expert-parallel", bool, None, "whole experts on every GPU of an engine", dest="enable_expert_parallel")
    flag("--dtype", str, None, "of the engine's weights; default %(default)s: the checkpoint's")
    flag("--host", str, None, "address of the engines' API; default %(default)s")
    port = "port of the first engine's API, the others count on; without it the first that are free from 8000 on"
    flag("--port", int, None, port)
    flag("--start-timeout-s", positive, "S", "longest start; default %(default)g")
    flag("--log-dir", Path, "DIR", "what the engines say; default %(default)s")
    flag = parser.flags("flags: the publish")
    flag("--to", str, "URL[,URL...]", "engines that run; may be given again", action="append", default=[])
    base = "checkpoint that engines of --to may hold: to those that prove it, only what differs is sent"
    flag("--base", Path, "DIR", base)
    zone = f"with --base: memory of each engine rank in which what differs arrives; default {DELTA_MIB}"
    flag("--delta-mib", count, "N", zone)
    ranks = "processes that read and send; default: one for each GPU in use, 1 on CPUs"
    flag("--ranks", count, "N", ranks, dest="num_ranks")
    flag("--threads", count, "N", "that read, in each rank; default %(default)s", dest="num_threads")
    links = ["auto", "nvlink", "rdma", "tcp"]
    flag("--transport", str, "LINK", f"{', '.join(links)}; default %(default)s", choices=links)
    flag("--watermark-mib", count, "N", "most temporary memory of a rank on its GPU; default %(default)s")
    deadline = "deadline of one publish to one engine, and of one request to it; default %(default)g"
    flag("--timeout-s", positive, "S", deadline)
    flag = parser.flags("flags: the end")
    flag("--once", bool, None, "end after the publish, and the started engines with it")
    flag("--json", bool, None, "the report for programs, as one line")
    return parser


def parity() -> Parser:
    from slipstream.orchestrator.parity.command import ParityOptions

    parser = Parser(texts.PARITY)
    parser.set_defaults(**_defaults(ParityOptions))
    flag = parser.flags("flags: what is sampled")
    flag("--prompts", count, "N", "of data.path, else random; default %(default)s", dest="num_prompts")
    flag("--prompt-tokens", count, "N", "length of a random prompt, most of a given one; default %(default)s")
    flag("--max-tokens", count, "N", "sampled after each prompt; default %(default)s")
    flag = parser.flags("flags: what is compared")
    layers = "sequences whose operations are compared, held in memory whole; default %(default)s"
    flag("--layer-prompts", count, "N", layers, dest="num_layer_prompts")
    flag("--transformers", bool, None, "score with transformers, too")
    usual = "parity.json of an earlier call on the same machine: name what differs more than it did then"
    flag("--usual", Path, "FILE", usual)
    flag = parser.flags("flags: what comes out")
    flag("--output", Path, "DIR", "where parity.json, parity.png and engine.log go; default %(default)s")
    flag("--json", bool, None, "the same figures for programs")
    flag("--config-dir", Path, "DIR", _CONFIG_DIR)
    return parser


def record() -> Parser:
    parser = Parser(texts.RECORD, model=Path)
    flag = parser.flags()
    flag("--tp", count, "N", "ranks of the engine; default %(default)s", default=1)
    flag("--expert-parallel", bool, None, "whole experts on every rank")
    flag("--dtype", str, None, "of the engine's weights; default %(default)s", default="bfloat16")
    device = "cuda or cpu: kind of device that the engine would run on; default %(default)s"
    flag("--device", str, "KIND", device, choices=["cuda", "cpu"], default="cuda")
    flag("--out", Path, "FILE", "also write the layouts there (slipstream.weight_sync.record.layout_wire reads them)")
    flag("--layout-cache", Path, "DIR", _LAYOUT_CACHE)
    flag("--json", bool, None, "the same for programs")
    return parser


def doctor() -> Parser:
    parser = Parser(texts.DOCTOR)
    parser.flags()("--json", bool, None, "the same findings for programs")
    return parser


def evaluate() -> Parser:
    parser = Parser(texts.EVAL)
    flag = parser.flags()
    flag("--checkpoint", str, "C", f"{_CHECKPOINT} newest")
    flag("--adapter", Path, "DIR", "an adapter in PEFT's format, in place of RUN's or beside MODEL")
    flag("--json", bool, None, "the table for programs")
    _start_nothing(flag)
    return parser


def merge() -> Parser:
    parser = Parser(texts.MERGE, run=Path)
    flag = parser.flags()
    flag("--checkpoint", str, "C", f"{_CHECKPOINT} %(default)s", default="newest")
    flag("--output", Path, "DIR", "a folder that is not there yet; RUN/merged")
    return parser


def status() -> Parser:
    parser = Parser(texts.STATUS, run=Path)
    parser.set_defaults(run=Path("runs/latest"))
    flag = parser.flags()
    flag("--json", bool, None, "the same for programs")
    flag("--curves", bool, None, "draw RUN/curves.png from the rows so far")
    return parser


def view() -> Parser:
    parser = Parser(texts.VIEW)
    parser.add_argument("runs", type=Path, nargs="*", help=argparse.SUPPRESS)
    flag = parser.flags()
    flag("--port", int, "N", "port on 127.0.0.1; default: any that is free", default=0)
    flag("--export", Path, "FILE.html", "write one file that any browser opens, and serve nothing")
    return parser


def recover() -> Parser:
    parser = Parser(texts.RECOVER, run=Path)
    worker = "this worker, whatever its state; without it: every worker that is out of service"
    parser.flags()("--worker", int, "N", worker)
    return parser


def scale() -> Parser:
    return Parser(texts.SCALE, run=Path, wanted=str)


def drain() -> Parser:
    return Parser(texts.DRAIN, run=Path, worker=str)


def chaos() -> Parser:
    from slipstream.orchestrator.chaos.command import ChaosOptions

    parser = Parser(texts.CHAOS, run=Path, victims=str)
    parser.set_defaults(**_defaults(ChaosOptions))
    flag = parser.flags("flags: what is done")
    flag("--list", bool, None, "show whom there is to harm on this machine, with process ids; harms nobody")
    ways = "kill (SIGKILL), stop (SIGSTOP, then SIGCONT), term (SIGTERM), slow, cut, fill; default %(default)s"
    flag("--what", str, "W[,W]", ways, default="kill")
    moments = "now, sampling, publish, verify, checkpoint, recovery, start; default now"
    flag("--when", str, "M[,M]", moments, default="now")
    flag("--stop-s", positive, "S", "how long stop, slow, cut and fill last; default %(default)g")
    flag("--rest-bytes", int, "N", "what fill leaves free; default %(default)d")
    flag("--seed", int, "N", "of the draw; default: any, which is said")
    flag("--resume", bool, None, "resume the run where it ends or its controller dies, as whoever watches it would")
    flag = parser.flags("flags: how often")
    flag("--every", positive, "S", "seconds from one event to the next, or until the run is as before")
    flag("--for", positive, "S", "seconds in which events begin", dest="for_s")
    flag("--patience-s", positive, "S", "longest wait for a moment, or until the run is as before; default %(default)g")
    flag("--json", bool, None, "the events for programs")
    return parser


def _start_nothing(flag: Add) -> None:
    whole = "print every option of this run with its value, as YAML; starts nothing"
    flag("--cfg", str, None, whole, choices=["job"])
    flag("--dry-run", bool, None, "check options, machine and files; starts nothing")


def _defaults(cls: Any) -> dict[str, Any]:
    """Field -> default of a dataclass, of those that have a plain one."""
    return {item.name: item.default for item in dataclasses.fields(cls) if item.default is not dataclasses.MISSING}


def options_of(kind: Callable[..., Options], flags: argparse.Namespace, *beside: str, **others: object) -> Options:
    """A dataclass with a field for each flag, but for those in `beside`; `others` are values in the place of what flags
    say."""
    given = {name: value for name, value in vars(flags).items() if name not in ("help", *beside)}
    return kind(**(given | others))


def is_option(word: str) -> bool:
    """Whether a word sets an option. A folder's path may have an equals sign, too."""
    return "=" in word and not Path(word).is_dir()
