"""Makes run folders up, with the product's own writers: what `slipstream view` is tested with.

Owns: figures that look like a run's. Does not own: any file's form; each is written by the class that writes it in a
run. Equal arguments give equal figures.
"""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

from slipstream.conf.load import load_run_config
from slipstream.fleet.fleet_log import FleetEvent, FleetLog, FleetRow
from slipstream.orchestrator.files.run_folder import RunFolder, write_description
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.files.timeline import Activity, StepTimeline
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.orchestrator.metrics.catalogue import RewardNames, Value
from slipstream.orchestrator.metrics.held_out import Evaluation
from slipstream.orchestrator.metrics.samples import TrainedRollout
from slipstream.orchestrator.metrics.step_rows import StepRecord
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.rollout.types import Group, Prompt, Rollout, Turn
from slipstream.trainer.types import OptimStats
from slipstream.weight_sync.publish.report import PublishReport, ReplicaReport

BEGAN = 1767225600.0
STEP_S = 10.0
NUM_WORKERS = 2
_LETTERS = np.array(list(" abcdefghijklmnopqrstuvwxyz0123456789"))


class MadeUpRun:
    """A run that can be written step by step, as a real one is.

    Args:
        root: the run folder; made.
        num_steps: what the run is to have in the end.
        num_samples: responses of a step that are shown.
        num_tokens: of a response.
        lr: shifts the curves, so that runs differ.
    """

    def __init__(
        self, root: Path, *, num_steps: int, num_samples: int = 8, num_tokens: int = 12, lr: float = 3e-3, seed: int = 0
    ) -> None:
        self.folder = RunFolder(root)
        self._draw = np.random.default_rng(seed)
        self._num_samples, self._num_tokens, self._lr = num_samples, num_tokens, lr
        root.mkdir(parents=True)
        words = ["experiment=quickstart", f"run.num_steps={num_steps}", f"trainer.optim.lr={lr}", f"run.seed={seed}"]
        config = load_run_config(words)
        write_description(self.folder, config, words)
        prepare_model(config.model, self.folder.model)
        self.telemetry = Telemetry(
            self.folder,
            num_steps=num_steps,
            first_step=0,
            progress=ProgressLine(Console(file=StringIO())),
            rewards=RewardNames(("letters",)),
            samples_per_step=num_samples,
            max_sample_bytes_per_step=64 << 20,
        )
        self._fleet = FleetLog(self.folder.fleet)
        for worker in range(NUM_WORKERS):
            for event, after_s in ((FleetEvent.process_up, -40.0), (FleetEvent.up, -8.0), (FleetEvent.serving, -1.0)):
                self._fleet.write(FleetRow(BEGAN + after_s, worker, f"rollout-{worker}", event))

    def write_step(self, step: int, groups: list[Group] | None = None) -> None:
        """Everything that a run writes in one step; of these groups, or of made-up ones."""
        groups = groups or self._groups(step)
        trained = {
            (g, r): self._trained(rollout, step)
            for g, group in enumerate(groups)
            for r, rollout in enumerate(group.rollouts)
        }
        began = BEGAN + step * STEP_S
        self.telemetry.step(
            StepRecord(
                step,
                step,
                groups=groups,
                staleness_steps=[step % 2] * len(groups),
                optim=OptimStats(step, 1.0 / (1 + step / 50), self._lr, True),
                sync=self._publish(step),
                evaluations=[self._evaluation(step, groups[:2])] if step % 10 == 0 else [],
                num_ranks=2,
                extra=self._figures(step),
                trained=trained,
                timeline=StepTimeline(began, began + STEP_S, list(self._activities(step, began, groups))),
            )
        )
        for worker in range(NUM_WORKERS):
            name = "rollout-1.1" if worker == 1 and step > 30 else f"rollout-{worker}"
            if worker == 1 and step == 30:
                for event, after_s in ((FleetEvent.failed, 1), (FleetEvent.restarting, 2), (FleetEvent.serving, 9)):
                    self._fleet.write(FleetRow(began + after_s, 1, "rollout-1.1", event, {"reason": "made up"}))
            since = 30 if worker == 1 and step > 30 else 0
            for after_s in (2.0, 4.0, 6.0, 8.0, 10.0):
                tokens = int(((step - since) * STEP_S + after_s) * 400)
                self._fleet.write(FleetRow(began + after_s, worker, name, FleetEvent.tokens, {"tokens": tokens}))

    def _evaluation(self, step: int, groups: list[Group]) -> Evaluation:
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        return Evaluation(step, step, {"": groups}, {"eval/step": step, "eval/reward": float(np.mean(rewards))})

    def _groups(self, step: int) -> list[Group]:
        size = min(4, self._num_samples)
        return [self._group(step, number, size) for number in range(-(-self._num_samples // size))]

    def _group(self, step: int, number: int, size: int) -> Group:
        draw, num_tokens = self._draw, self._num_tokens
        solved = 1 - np.exp(-self._lr * (step + 1) / 0.06)
        rewards = [float(value) for value in (draw.random(size) < solved)]
        ids = draw.integers(2, 38, (size, num_tokens))
        logprobs = np.round(-draw.exponential(0.4, (size, num_tokens)), 4)
        first = max(step - step % 2, 0)
        versions = [first] * (num_tokens // 2) + [step] * (num_tokens - num_tokens // 2)
        rollouts = [
            Rollout(
                own.tolist(), values.tolist(), versions, "".join(_LETTERS[own % len(_LETTERS)]),
                "length" if draw.random() < 0.1 else "stop",
                turns=_turns(num_tokens) if number == 1 and step % 5 == 0 else (),
            )
            for own, values in zip(ids, logprobs, strict=True)
        ]  # fmt: skip
        prompt = Prompt((step * 31 + number) % 704, (1, 2, 3), f"find {_LETTERS[1 + number % 26]} in step {step} =")
        return Group(prompt, rollouts, list(rewards), [{"letters": reward} for reward in rewards])

    def _trained(self, rollout: Rollout, step: int) -> TrainedRollout:
        noise = self._draw.normal(0, 0.002 if step % 97 else 0.4, len(rollout.logprobs))
        values = [one + float(other) for one, other in zip(rollout.logprobs, noise, strict=True)]
        return TrainedRollout(step % 2, [float(self._draw.normal())] * len(values), list(values))

    def _figures(self, step: int) -> dict[str, Value]:
        draw = self._draw
        k3 = 3e-6 * float(draw.lognormal(0, 0.2))
        return {
            "parity/k3": k3,
            "parity/floor_k3": k3 / 3 if step % 10 == 1 else None,
            "policy/entropy": 1.2 * float(np.exp(-step / 400)) + 0.05 * float(draw.random()),
            "rollout/wait_s": 3.2 + float(draw.normal(0, 0.1)),
            "trainer/forward_backward_s": 4.4 + float(draw.normal(0, 0.1)),
            "trainer/optimizer_s": 0.3,
            "rollout/replicas_serving": 1 if step == 30 else 2,
            "loss/clip_fraction": 0.01 * float(draw.random()),
            "step/total_s": STEP_S,
        }

    def _publish(self, step: int) -> PublishReport:
        return PublishReport(
            version=step, epoch=step, replicas=(
                ReplicaReport("tcp://one", True, None, 0.9),
                ReplicaReport("tcp://other", step != 30, None if step != 30 else "TransferTimeout: made up", 0.8),
            ),
            pause_s=0.9, begin_s=0.2, idle_s=0.15, mark_s=0.05, prepare_s=0.3, write_s=0.5, verify_s=0.1, commit_s=0.1,
            total_s=0.95, num_bytes=900_000_000, peak_bytes=int(12e6 + 3e6 * self._draw.random()),
            watermark_bytes=16 << 20, num_changed_params=10,
        )  # fmt: skip

    def _activities(self, step: int, began: float, groups: list[Group]) -> Iterator[Activity]:
        waited = 3.2
        for number, group in enumerate(groups[:60]):
            ended = began + waited * (number + 1) / min(len(groups), 60)
            worker, prompt = f"rollout-{number % NUM_WORKERS}", group.prompt.prompt_id
            yield Activity(worker, "sample", max(began - 0.4, ended - 1.5), ended - 0.1, prompt)
            yield Activity("rewards", "judge", ended - 0.1, ended - 0.02, prompt)
        at = began
        for what, seconds in (
            ("wait for rollouts", waited),
            ("forward and backward", 4.4),
            ("optimizer", 0.3),
            ("publish", 0.95),
        ):
            yield Activity("trainer", what, at, at + seconds)
            at += seconds


def _turns(num_tokens: int) -> tuple[Turn, ...]:
    third = num_tokens // 3
    return (
        Turn(None, [1, 2], third, "start", "system: play\nuser: begin", "first move"),
        Turn(0, [5], third, "", "tool: moved", "second move"),
        Turn(None, [9], num_tokens - 2 * third, "edited", "user: a shorter history", "last move"),
    )


def make_run(root: Path, *, num_steps: int, **arguments: float) -> RunFolder:
    """A run that has ended after `num_steps`. Other arguments as of MadeUpRun."""
    run = MadeUpRun(root, num_steps=num_steps, **arguments)  # pyright: ignore[reportArgumentType]
    with run.telemetry:
        for step in range(1, num_steps + 1):
            run.write_step(step)
    return run.folder
