"""Compare our losses with TRL's and verl's, and with what was recorded of them.

    make oracles                    install both peers into .oracles, then check
    python tests/oracles/record.py --write      record what the peers give

Prints one line per case: the largest relative difference of loss and gradients.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
sys.path.append(str(ROOT / ".oracles"))
RECORDED = Path(__file__).with_name("recorded.json")
RELATIVE = 1e-6

from oracles.advantages import ADVANTAGE_CASES, our_advantages, their_advantages  # noqa: E402
from oracles.cases import CASES, DPO_CASES, our_dpo, ours  # noqa: E402
from oracles.peers import their_dpo, theirs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RECORDED.name}")
    write = parser.parse_args().write
    recorded: dict[str, Any] = {} if write else json.loads(RECORDED.read_text())["cases"]
    worst = 0.0
    sides = {name: (ours(case), theirs(case)) for name, case in CASES.items()}
    sides |= {name: ((our_advantages(case),), (their_advantages(case),)) for name, case in ADVANTAGE_CASES.items()}
    sides |= {name: (our_dpo(beta), their_dpo(beta)) for name, beta in DPO_CASES.items()}
    for name, (mine, peer) in sides.items():
        numbers = [value.tolist() for value in peer]
        apart = max(_apart(one, other) for one, other in zip(mine, peer, strict=True))
        if write:
            recorded[name] = numbers
        else:
            kept = [torch.tensor(value, dtype=torch.float64) for value in recorded[name]]
            apart = max(apart, *(_apart(one, other) for one, other in zip(kept, peer, strict=True)))
        worst = max(worst, apart)
        print(f"{name:40} {apart:.1e}")
    if write:
        peers = {name: version(name) for name in ("trl", "verl")}
        RECORDED.write_text(json.dumps({"peers": peers, "cases": recorded}, indent=1) + "\n")
        print(f"written: {RECORDED}")
    if worst > RELATIVE:
        sys.exit(f"the largest difference is {worst:.1e}, more than {RELATIVE:.0e}")


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


if __name__ == "__main__":
    main()
