"""Tasks for a small chat model, made by this script: rows of a chat prompt and a whole number as the answer.

    python examples/real_model/tasks.py sums FOLDER        train.jsonl (4,000 rows), heldout.jsonl (128 others)

    sums     "What is 12 + 30 + 7?", two or three numbers up to 60. The base model answers in prose, and adds badly
    small    two numbers up to 20, after a solved one: most answers have the form at once, so that a CPU sees it learn
    chain    "Start with 7. Then add 5. Then double it. ...", four to six steps, after a solved one of two steps: an
             answer is right if every step is written down, so that responses must grow
    gym      leg_counting of reasoning_gym (pip install reasoning-gym==0.1.25), after a solved one: "How many legs are
             there in total if you have 2 cows, 1 ant?"

The reward of all is reward.py's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILES = {"train.jsonl": (4000, 1), "heldout.jsonl": (128, 2)}
"""Number of rows and seed of each."""
GYM_TASK = "leg_counting"
GYM_OPTIONS = {"min_animals": 1, "max_animals": 3, "min_instances": 1, "max_instances": 6}


CHAIN_ENDS = "Write down the number after every step, then end with 'Answer: ' and the last number."
GYM_ENDS = "Think briefly, then end with 'Answer: ' and the number."


def sums(num_rows: int, seed: int) -> Iterator[tuple[str, int]]:
    """Two or three numbers from 2 to 60."""
    draw = random.Random(seed)
    for _ in range(num_rows):
        terms = [draw.randint(2, 60) for _ in range(draw.choice([2, 3]))]
        asked = " + ".join(map(str, terms))
        yield f"What is {asked}? Think briefly, then end with 'Answer: ' and the number.", sum(terms)


def small(num_rows: int, seed: int) -> Iterator[tuple[str, int]]:
    """Two numbers from 2 to 20."""
    draw = random.Random(seed)
    for _ in range(num_rows):
        first, second = draw.randint(2, 20), draw.randint(2, 20)
        yield f"What is {first} + {second}? Think briefly, then end with 'Answer: ' and the number.", first + second


def chain(num_rows: int, seed: int) -> Iterator[tuple[str, int]]:
    """Four to six steps from a number below 10; no value leaves 0 to 99."""
    draw = random.Random(seed)
    for _ in range(num_rows):
        value = draw.randint(2, 9)
        said = [f"Start with {value}."]
        for _ in range(draw.randint(4, 6)):
            by = draw.randint(1, 9)
            steps = [(f"add {by}", value + by), (f"subtract {by}", value - by), ("double it", 2 * value)]
            step, value = draw.choice([one for one in steps if 0 <= one[1] < 100])
            said.append(f"Then {step}.")
        yield f"{' '.join(said)} {CHAIN_ENDS}", value


def gym(num_rows: int, seed: int) -> Iterator[tuple[str, int]]:
    """reasoning_gym's GYM_TASK."""
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise SystemExit("--task gym needs a package: uv pip install reasoning-gym==0.1.25") from None

    for row in reasoning_gym.create_dataset(GYM_TASK, size=num_rows, seed=seed, **GYM_OPTIONS):
        yield f"{row['question']} {GYM_ENDS}", int(row["answer"])


Task = Callable[[int, int], Iterator[tuple[str, int]]]
TASKS: dict[str, Task] = {"sums": sums, "small": small, "chain": chain, "gym": gym}
SOLVED = {
    "small": ("What is 12 + 3? Think briefly, then end with 'Answer: ' and the number.", "12 + 3 = 15. Answer: 15"),
    "chain": (f"Start with 3. Then add 4. Then double it. {CHAIN_ENDS}", "3 + 4 = 7. 7 + 7 = 14. Answer: 14"),
    "gym": (
        f"How many legs are there in total if you have 2 cows, 1 ant? {GYM_ENDS}",
        "2 cows have 2 * 4 = 8 legs. 1 ant has 6 legs. 8 + 6 = 14. Answer: 14",
    ),
}
"""What a task's prompts begin with: a question and its answer, as turns of the conversation."""


def rows(task: str, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows as data.path takes them."""
    solved = [{"role": role, "content": said} for role, said in zip(("user", "assistant"), SOLVED.get(task, ()))]
    return [
        {"prompt": [*solved, {"role": "user", "content": asked}], "answer": str(answer)}
        for asked, answer in TASKS[task](num_rows, seed)
    ]


def write(task: str, folder: Path) -> Path:
    """Both files. A held-out prompt that is also a training prompt is left out of the training rows."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: rows(task, *of) for name, of in FILES.items()}
    held_out = {row["prompt"][-1]["content"] for row in made["heldout.jsonl"]}
    made["train.jsonl"] = [row for row in made["train.jsonl"] if row["prompt"][-1]["content"] not in held_out]
    for name, lines in made.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write(args.task, args.folder)
