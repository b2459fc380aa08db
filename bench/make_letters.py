"""Writes the letters task that ships in conf/data: find the one letter among digits, then answer with it.

    41g7=   ->  g        the right answer depends on the prompt; the best constant answer scores 1/8

Each prompt has 3 or 4 digits, one of 8 letters at a random place, and "=". A digit string is used in only one split, so
no held-out prompt shares its digits with a training prompt. Within a split every letter appears equally often. The
output depends only on SEED: run it again and git shows no difference.

    python bench/make_letters.py
"""

import json
import random
from pathlib import Path

SEED = 20260101
LETTERS = "abcdefgh"
NUM_TRAIN_PAIRS = 88  # of the 100 pairs of digits; the other 12 are held out
FOLDER = Path(__file__).resolve().parent.parent / "conf" / "data"


def make_rows(pairs: list[str], rng: random.Random) -> list[dict[str, str]]:
    """Every letter once with every pair of digits, at a random place, in random order."""
    rows: list[dict[str, str]] = []
    for digits in pairs:
        for answer in LETTERS:
            place = rng.randint(0, len(digits))
            rows.append({"prompt": f"{digits[:place]}{answer}{digits[place:]}=", "answer": answer})
    rng.shuffle(rows)
    return rows


def make_splits() -> dict[str, list[dict[str, str]]]:
    """File name -> rows."""
    rng = random.Random(SEED)
    pairs = [f"{number:02d}" for number in range(100)]
    rng.shuffle(pairs)
    return {
        "letters_train.jsonl": make_rows(pairs[:NUM_TRAIN_PAIRS], rng),
        "letters_heldout.jsonl": make_rows(pairs[NUM_TRAIN_PAIRS:], rng),
    }


def main() -> None:
    for name, rows in make_splits().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
        print(f"{FOLDER / name}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
