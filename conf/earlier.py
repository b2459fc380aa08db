"""Options of earlier releases: what each is called now, or what to do where it is no more.

    command line                   an old name is refused, with the new one
    config.yaml of an old run      an old name is read as the new one, and so is a function's; a value that every run
                                   has now is dropped; any other is refused, in one line that says how to go on

Owns: both tables. Does not own how options are read (load.py).
"""

import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import under_one_name
from slipstream.conf.json_files import JsonObject, is_list, is_object, object_or_empty

REWARD = "reward."
"""Options of a reward are there, and in reward.parts.NAME."""
MOVED = {
    **{f"rollout.eval_{name}": f"rollout.eval.{name}" for name in ("temperature", "top_p", "top_k", "seed")},
    "data.messages_key": "data.columns.messages",
    "data.response_key": "data.columns.response",
    "reward.answer_key": "data.columns.answer",
    "reward.choice_key": "data.columns.reward",
    "reward.code.tests_key": "data.columns.tests",
}
"""Old name -> the name that takes the same values."""


_TARGETS = ("attention", "mlp", "experts")


class Gone(NamedTuple):
    """Options without successors of the same values."""

    names: tuple[str, ...]
    cure: str
    """What to do in their place; ends "there is no option NAME any more; "."""
    values: Mapping[tuple[object, ...], Mapping[str, object]] = MappingProxyType({})
    """What they may be in the folder of an old run -> what that is now. A folder that lacks one has its first."""


def _gone(name: str, cure: str, *values: object) -> Gone:
    """An option that every run has at one of these values now."""
    return Gone((name,), cure, {(value,): {} for value in values})


def _shaped(name: str, neutral: float) -> Gone:
    return _gone(
        f"rollout.sampling.{name}",
        "training refuses it, because engines return log-probabilities of what it leaves or makes of the distribution, "
        "and the trainer's are of the whole softmax(logits / temperature), so that ratios, importance weights and "
        "parity/k3 would compare two policies; for evaluations set rollout.eval.top_p or rollout.eval.top_k",
        neutral,
    )


GONE = (
    _gone(
        "algorithm.tis_max",
        "set algorithm.correction=tis and algorithm.correction_max, or algorithm.correction=none where it was 0",
    ),
    _gone("algorithm.advantage_scale", "set algorithm.advantage: group_std for std, group for none, or leave_one_out"),
    _shaped("top_p", 1),
    _shaped("top_k", 0),
    _shaped("min_p", 0),
    _shaped("repetition_penalty", 1),
    _shaped("presence_penalty", 0),
    *(
        _gone(f"rollout.{name}", "set rollout.eval.top_p or rollout.eval.top_k", neutral)
        for option, neutral in {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}.items()
        for name in (f"eval_{option}", f"eval.{option}")
    ),
    Gone(
        ("rollout.episodes.host", "rollout.episodes.port"),
        "set rollout.episodes.address=HOST:PORT",
        {("127.0.0.1", 0): {}},
    ),
    _gone("weight_sync.on_busy_slot", "set weight_sync.pause_mode: keep for re_prefill, abort for requeue"),
    Gone(
        ("data.curriculum", "data.shuffle"),
        "set data.order",
        {
            ("none", True): {},
            ("none", False): {"data.order": "given"},
            ("middling", True): {"data.order": "middling"},
            ("middling", False): {"data.order": "middling"},
        },
    ),
    Gone(
        ("trainer.activation_checkpointing", "trainer.activations_on_host"),
        "set trainer.activations=recompute, keep or host",
        {
            (True, False): {},
            (False, False): {"trainer.activations": "keep"},
            (True, True): {"trainer.activations": "host"},
        },
    ),
    Gone(
        ("trainer.numerics.adapters",),
        "set trainer.numerics.match=merged, or engine for separate",
        {("separate",): {}, ("merged",): {"trainer.numerics.match": "merged"}},
    ),
    Gone(
        tuple(f"trainer.lora.{name}" for name in _TARGETS),
        "set trainer.lora.targets",
        {
            flags: {"trainer.lora.targets": list(itertools.compress(_TARGETS, flags))}
            for flags in itertools.product((True, False), repeat=len(_TARGETS))
        },
    ),
    _gone("data.add_special_tokens", "they are added to a prompt that is text and does not have them", True),
    _gone("cluster.object_store_bytes", "it follows from what the routes of a run take, and from /dev/shm", 512 << 20),
    *(
        _gone(name, f"it is {value} in every run", value)
        for name, value in {
            "algorithm.max_uninformative_batches": 10,
            "algorithm.sapo_tau_negative": 1.05,
            "algorithm.sapo_tau_positive": 1.0,
            "algorithm.teacher.max_concurrent": 64,
            "algorithm.teacher.max_tries": 6,
            "algorithm.teacher.try_timeout_s": 60.0,
            "data.curriculum_floor": 0.1,
            "data.stream_buffer_rows": 1000,
            "parity.floor_sequences": 4,
            "reward.judge.max_tries": 6,
            "reward.judge.try_timeout_s": 60.0,
            "reward.code.disk_bytes": 64 << 20,
            "reward.code.max_processes": 32,
            "rollout.episodes.blocked_s": 30.0,
            "rollout.restart_backoff_s": 1.0,
            "run.eval_share": 0.25,
            "run.max_sample_bytes_per_step": 262_144,
            "trainer.optim.eps": 1e-8,
            "weight_sync.verify_hashes": True,
        }.items()
    ),
    _gone("weight_sync.publish_waves", "a publish goes to all replicas at once", 1),
    _gone("parity.floor_every_steps", "the floor is measured at every tenth step", 10, 0),
    _gone("reward.judge.verdict_pattern", "the last number of an answer is the score", r"(-?\d+(?:\.\d+)?)"),
    _gone("reward.code.cpu_s", "it is reward.code.wall_s in every run", 10.0),
    _gone("cluster.dashboard_port", "it is 8265, or the next free one, which the run says", None, 8265),
    _gone("run.eval_pass_at", "it is 1, 2, 4 and so on up to run.eval_samples_per_prompt", ()),
    _gone("model.init_std", "set model.hf_config.initializer_range"),
    _gone("run.wandb.entity", "set run.project=TEAM/PROJECT"),
    _gone("run.wandb.mode", "set the environment variable WANDB_MODE"),
    _gone("run.mlflow.tracking_uri", "set the environment variable MLFLOW_TRACKING_URI"),
    _gone("run.mlflow.experiment", "set run.project"),
    _gone("run.wandb.project", "set run.project"),
    _gone("weight_sync.enabled", "run python -m bench.controls train to publish nothing but version 0", True),
    _gone("algorithm.shuffle_advantages", "set algorithm.advantage=bench/controls.py:shuffled", False),
    _gone("reward.judge.max_tokens", "set reward.judge.extra.max_tokens", 512),
    _gone("reward.judge.temperature", "set reward.judge.extra.temperature", 0),
    _gone("cluster.trainer_gpus", "set trainer.num_ranks, also for slipstream plan", None),
    _gone("cluster.rollout_gpus", "set rollout.num_workers and rollout.tp_size, also for slipstream plan", None),
    _gone("trainer.logprob_chunk_tokens", "the run chooses it by its vocabulary", 1024, 4096, 8192),
    Gone(
        ("weight_sync.keep_kv",),
        "set weight_sync.pause_mode=keep_kv",
        {(False,): {}, (True,): {"weight_sync.pause_mode": "keep_kv"}},
    ),
    _gone("reward.judge.highest", "set reward.judge.scale", 10),
    _gone("reward.judge.lowest", "set reward.judge.scale", 0),
    Gone(
        ("rollout.batch_invariant", "trainer.engine_forward"),
        "choose parity=bitwise, which sets trainer.numerics.match=bitwise for trainer and engines",
        {(False, False): {}, (True, True): {"trainer.numerics.match": "bitwise"}},
    ),
    Gone(
        (
            *(f"trainer.numerics.{name}" for name in ("attention", "norm", "rotation", "dense_activation")),
            *(f"trainer.numerics.{name}" for name in ("expert_activation", "router_weights", "router_logits")),
            "trainer.numerics.routed_scale",
            "trainer.combine",
            "model.mla_norm_eps",
        ),
        "choose all roundings at once: trainer.numerics.match=engine or transformers",
        {
            ("auto", "once", "once", "once", "each", "float32", "engine", "output", "vllm_like", "rollout"): {},
            ("own", "each", "each", "each", "once", "model", "float32", "weights", "hf_eager", "hf"): {
                "trainer.numerics.match": "transformers"
            },
        },
    ),
)

GONE_CHOICES = {"weight_sync=disabled": "run python -m bench.controls train to publish nothing but version 0"}
"""Choices of a group -> what to do in their place, as in Gone."""


def explain(name: str) -> str | None:
    """What to say of an option of an earlier release, or of a choice (GROUP=CHOICE); None: there was none."""
    part = re.match(r"reward\.parts\.[^.]+\.", name)
    where = part[0] if part else REWARD
    name_of_one = REWARD + name.removeprefix(where) if part else name
    if name_of_one in MOVED:
        return f"there is no option {name} any more; it is {MOVED[name_of_one]} now"
    cure = next((gone.cure for gone in GONE if name_of_one in gone.names), GONE_CHOICES.get(name))
    return None if cure is None else f"there is no option {name} any more; {cure.replace(REWARD, where)}"


def carried_over(options: JsonObject) -> JsonObject:
    """The options of an old run under the names of this release. Changes and returns `options`.

    Args:
        options: Section by section, as in config.yaml.

    Raises:
        ConfigError: The run depends on an option that is no more.
    """
    _rename_functions(options)
    _name_project(options)
    _move_spread(options)
    _choose_pause_mode(options)
    parts = object_or_empty(object_or_empty(options.get("reward")).get("parts"))
    for where in (REWARD, *(f"{REWARD}parts.{name}." for name in parts)):
        _carry_over(options, where)
    return options


def _name_project(options: JsonObject) -> None:
    """W&B's project, which its team begins, or where the run has another logger, MLflow's experiment. What its logger
    does not read, or reads in the environment as well, is dropped."""
    run = object_or_empty(options.get("run"))
    loggers = run.get("loggers", ())
    for name, named, usual in (("mlflow", "experiment", None), ("wandb", "project", "online")):
        section = object_or_empty(run.get(name))
        team, project = section.pop("entity", None), section.pop(named, None)
        if name in loggers and project is not None:
            run["project"] = f"{team}/{project}" if team else project
        if name not in loggers or section.get("mode", section.get("tracking_uri")) in (None, usual):
            run.pop(name, None)


def _choose_pause_mode(options: JsonObject) -> None:
    """What happens to requests in flight had a name for each mode, and only one was read."""
    sync = object_or_empty(options.get("weight_sync"))
    busy = sync.pop("on_busy_slot", None)
    if busy is not None and sync.get("mode") == "adapter":
        sync["pause_mode"] = {"re_prefill": "keep", "requeue": "abort"}.get(busy, busy)


def _move_spread(options: JsonObject) -> None:
    """The spread of random weights is a field of the model's config, which a run of a checkpoint has none of."""
    model = object_or_empty(options.get("model"))
    spread = model.pop("init_std", None)
    if spread is not None and model.get("init") == "random":
        model["hf_config"] = object_or_empty(model.get("hf_config")) | {"initializer_range": spread}


def _rename_functions(options: JsonObject) -> None:
    for name, value in options.items():
        if is_object(value):
            _rename_functions(value)
        elif isinstance(value, str):
            options[name] = under_one_name(value)


def _carry_over(options: JsonObject, where: str) -> None:
    """Do it where options of a reward are: `where` is in the place of REWARD."""
    for old, new in MOVED.items():
        name, value = old.replace(REWARD, where), _take(options, old.replace(REWARD, where))
        if not new.startswith("data.columns."):
            if value is not _ABSENT:
                _put(options, new, value)
        elif value not in (_ABSENT, new.rpartition(".")[2]):  # of this name it is found without an option
            raise ConfigError(
                f"the run has {name}={value}, which is {new} now, and a resumed run must keep its data.columns; go on "
                "with the release that began the run"
            )
    for gone in GONE:
        names = [name.replace(REWARD, where) for name in gone.names]
        taken = {name: _take(options, name) for name in names}
        found = {name: tuple(v) if is_list(v) else v for name, v in taken.items() if v is not _ABSENT}
        if not found:
            continue
        usual = next(iter(gone.values), (_ABSENT,) * len(names))
        key = tuple(found.get(name, value) for name, value in zip(names, usual, strict=True))
        if key not in gone.values:
            own = zip(names, key, usual, strict=True)
            given = " ".join(f"{name}={value}" for name, value, of_most in own if value != of_most)
            raise ConfigError(
                f"the run has {given}, and there is no such option any more; {gone.cure.replace(REWARD, where)}, and "
                "give run.resume=FOLDER to slipstream train, or go on with the release that began the run"
            )
        for name, value in gone.values[key].items():
            _put(options, name, value)


_ABSENT = object()


def _take(options: JsonObject, name: str) -> object:
    """Remove an option and return its value, or _ABSENT."""
    first, _, rest = name.partition(".")
    if not rest:
        return options.pop(first, _ABSENT)
    below = options.get(first)
    return _take(below, rest) if is_object(below) else _ABSENT


def _put(options: JsonObject, name: str, value: object) -> None:
    first, _, rest = name.partition(".")
    if rest:
        _put(options.setdefault(first, {}), rest, value)
    else:
        options[first] = value
