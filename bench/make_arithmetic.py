"""Writes the arithmetic task: sums of several steps, worked step by step, with a known share of wrong steps.

    {"prompt": "3+4-2-1=", "answer": "4", "response": "3+4=8;8-2=6;6-1=5;#5"}

A response is the working that fine-tuning demonstrates: one `a+b=c;` per step, then `#` and the last result. A step is
wrong with probability `wrong_share`: it has one of the other results that keep all later ones between 0 and `largest`
(here the first step), and the working goes on from there. If there is no such result, the step is right. A model that
was taught this imitates the mistakes, too. That is the room that is left to reinforcement, which sees `answer` alone,
and `answer` is always right.

Both files hold the same kind of rows. No expression is there twice, in one file or in both. The output depends only on
the options.

    python bench/make_arithmetic.py             runs/arithmetic, for the presets arithmetic_sft and arithmetic_grpo
    python bench/make_arithmetic.py --gpu       runs/arithmetic_gpu, for their GPU sizes: longer sums, larger numbers
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, str]
MOST_DRAWS_PER_ROW = 20
"""How often an expression may be drawn that is there already, on average, before the task is taken for too small."""


@dataclass(frozen=True, slots=True)
class Task:
    """How hard the sums are, and how many rows are written."""

    fewest_steps: int
    most_steps: int
    largest: int
    """The largest number that appears; the smallest result is 0, the smallest operand 1."""
    wrong_share: float
    num_train: int
    num_heldout: int
    seed: int = 20260101

    def __post_init__(self) -> None:
        if not 1 <= self.fewest_steps <= self.most_steps:
            raise ValueError(f"steps must be 1 <= fewest <= most, got {self.fewest_steps} and {self.most_steps}")
        if not 0 <= self.wrong_share <= 1:
            raise ValueError(f"--wrong-share must be from 0 to 1, got {self.wrong_share}")
        for name in ("largest", "num_train", "num_heldout"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


SMALL = Task(fewest_steps=3, most_steps=5, largest=9, wrong_share=0.45, num_train=20_000, num_heldout=256)
LARGE = Task(fewest_steps=16, most_steps=24, largest=99, wrong_share=0.1, num_train=40_000, num_heldout=256)


def expression(task: Task, draw: random.Random) -> list[int]:
    """A start and the changes after it, e.g. [3, 4, -2, -1]. No running total leaves 0 to `largest`."""
    total = draw.randint(0, task.largest)
    numbers = [total]
    for _ in range(draw.randint(task.fewest_steps, task.most_steps)):
        change = draw.choice([c for c in range(-total, task.largest - total + 1) if c != 0])
        numbers.append(change)
        total += change
    return numbers


def working(numbers: list[int], wrong_share: float, largest: int, draw: random.Random) -> str:
    """The demonstrated response. A step that has no wrong result within 0 to `largest` is right."""
    totals = [sum(numbers[: i + 1]) for i in range(len(numbers))]
    steps: list[str] = []
    for i in range(1, len(numbers)):
        lowest, highest = -min(totals[i:]), largest - max(totals[i:])
        shifts = [shift for shift in range(lowest, highest + 1) if shift != 0]
        if shifts and draw.random() < wrong_share:
            shift = draw.choice(shifts)
            totals[i:] = [total + shift for total in totals[i:]]
        steps.append(f"{totals[i - 1]}{numbers[i]:+d}={totals[i]};")
    return f"{''.join(steps)}#{totals[-1]}"


def make_rows(task: Task) -> tuple[list[Row], list[Row]]:
    """(training, held out).

    Raises:
        ValueError: there are not that many different sums.
    """
    draw = random.Random(task.seed)
    rows: dict[str, Row] = {}
    wanted = task.num_train + task.num_heldout
    for _ in range(MOST_DRAWS_PER_ROW * wanted):
        numbers = expression(task, draw)
        prompt = f"{numbers[0]}{''.join(f'{change:+d}' for change in numbers[1:])}="
        if prompt not in rows:
            response = working(numbers, task.wrong_share, task.largest, draw)
            rows[prompt] = {"prompt": prompt, "answer": str(sum(numbers)), "response": response}
        if len(rows) == wanted:
            made = list(rows.values())
            return made[task.num_heldout :], made[: task.num_heldout]
    raise ValueError(
        f"only {len(rows)} different sums of {task.fewest_steps} to {task.most_steps} steps with numbers up to "
        f"{task.largest} were found, and {wanted} are wanted; give more steps or a larger --largest, or fewer rows"
    )


def share_right(rows: list[Row]) -> float:
    """Share of demonstrations whose last result is the answer: about what a model that imitates them scores."""
    return sum(row["response"].rpartition("#")[2] == row["answer"] for row in rows) / len(rows)


def write(task: Task, folder: Path) -> None:
    """Make both files and say what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), make_rows(task), strict=True):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
        longest = max(len(row["response"]) for row in rows)
        print(f"{file}: {len(rows)} sums, {share_right(rows):.3f} worked right, at most {longest} characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the size for GPUs; options below change single figures")
    parser.add_argument("--out", type=Path, help="folder; default runs/arithmetic, or runs/arithmetic_gpu")
    for field, default in asdict(SMALL).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), dest=field)
    given = vars(parser.parse_args())
    is_gpu, folder = given.pop("gpu"), given.pop("out")
    options = asdict(LARGE if is_gpu else SMALL) | {name: value for name, value in given.items() if value is not None}
    try:
        write(Task(**options), folder or ROOT / "runs" / ("arithmetic_gpu" if is_gpu else "arithmetic"))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
