"""Plant small faults in the modules that can hurt a user, one at a time, and see whether their unit tests notice.

    python tests/mutants/plant.py [--seed N] [--sample N] [MODULE ...]      `make mutants` runs it on all of MODULES

Faults are mutmut's (docs/decisions/0029): it writes a copy of the module that has all of them, runs the tests once, and
forks for each fault with the tests imported. Owns: which faults are drawn, of which modules and for which tests; the
copy of the tree, under build/mutants, in which all of it happens; the judgement. A fault in the text of a message or in
what is logged is not drawn: tests may read messages, and need not.
Invariant: equal seeds draw equal faults of equal code.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
TOOL = ROOT / ".mutants"
PACKAGES = ("conf", "weight_sync", "trainer", "rollout", "fleet", "orchestrator")
LEAST_SHARE = 0.8
"""Of all drawn faults. Some change nothing that anybody could see: first values that are never read, guards that
another guard makes unreachable. Among mutmut's they are about a tenth."""
SURVIVED, UNTESTED = 0, 33
"""mutmut's exit codes: all tests passed; no test calls the function."""

UNIT = "tests/unit"
PUBLISHER = "publisher publisher_ranks publisher_rejoin"
MODULES = {
    "conf/failures.py": "failures",
    "weight_sync/plan/plan.py": "plan proof shares",
    "weight_sync/plan/piece_proof.py": "plan proof shares",
    "weight_sync/plan/proof.py": "plan proof shares",
    "weight_sync/plan/schedule.py": "plan proof shares",
    "weight_sync/pipeline/pipeline.py": "pipeline lanes lane_times trainer/delivery/delta_publish",
    "weight_sync/pipeline/lanes.py": "pipeline lanes lane_times trainer/delivery/delta_publish",
    "weight_sync/pipeline/staging_slots.py": "lanes lane_times",
    "weight_sync/pipeline/writes.py": "lanes",
    "weight_sync/publish/transaction.py": "transaction",
    "weight_sync/publish/publisher.py": f"{PUBLISHER} trainer/delivery/delta_publish",
    "weight_sync/publish/rank0.py": f"bases {PUBLISHER}",
    "weight_sync/replica/receiver.py": "receiver receiver_order recovery",
    "weight_sync/replica/version_state.py": "version_state",
    "weight_sync/replica/recovery.py": "recovery",
    "weight_sync/integrity.py": "integrity",
    "trainer/step/loss.py": "loss",
    "trainer/step/surrogates.py": "surrogates loss",
    "trainer/step/corrections.py": "corrections",
    "trainer/step/microbatches.py": "microbatches",
    "trainer/step/learner.py": "learner",
    "trainer/moe/dispatch.py": "moe_block moe_pieces dispatch",
    "trainer/moe/experts.py": "moe_block moe_pieces",
    "trainer/moe/router.py": "moe_block moe_pieces",
    "weight_sync/merging/rounding.py": "trainer/rounding",
    "weight_sync/merging/merge.py": "trainer/weights/merge",
    "trainer/weights/block_scales.py": "block_scales",
    "trainer/weights/stored_adapter.py": "stored_adapter",
    "orchestrator/loop/buffer.py": "buffer",
    "orchestrator/loop/advantages.py": "advantages",
    "orchestrator/loop/updates.py": "advantages distillation updates",
    "orchestrator/loop/publication.py": "publication",
    "orchestrator/checkpoints/run_checkpoint.py": "run_checkpoint fingerprint",
    "orchestrator/checkpoints/manifest.py": "run_checkpoint",
    "rollout/agents/token_tree.py": "token_tree plain_prompts",
    "rollout/agents/episode.py": "episode",
    "rollout/branches.py": "branches",
    "rollout/text/chat_template.py": "rollout/chat_template orchestrator/data/prompts",
    "rollout/text/ends.py": "rollout/ends",
    "rollout/text/messages.py": "rollout/messages",
    "rollout/text/plain_template.py": "rollout/chat_template",
    "rollout/text/plain_text.py": "rollout/plain_text",
    "fleet/supervisor.py": "supervisor",
    "fleet/starts.py": "supervisor supervisor_recovery",
    "fleet/scaling.py": "coming_and_going following",
    "fleet/roster.py": "supervisor coming_and_going",
    "fleet/router.py": "router",
}
"""Module -> its own tests below tests/unit: their names, in the same folder unless they say another."""


def main() -> int:
    """See the module's docstring. Returns 1 where too few faults were noticed."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("modules", nargs="*", default=list(MODULES))
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--sample", type=int, default=12, help="faults of each module")
    given = arguments.parse_args()
    num_drawn = num_noticed = 0
    for module in given.modules:
        copy_tree(module)
        drawn = drawn_faults(module, given.sample, given.seed)
        missed = [name for name, code in run_faults(module, drawn).items() if code in (SURVIVED, UNTESTED)]
        num_drawn, num_noticed = num_drawn + len(drawn), num_noticed + len(drawn) - len(missed)
        print(f"{module}: {len(drawn) - len(missed)} of {len(drawn)}", flush=True)
        for name in missed:
            print(mutmut("show", name).stdout, flush=True)
    share = num_noticed / max(num_drawn, 1)
    print(f"unit tests noticed {num_noticed} of {num_drawn} faults ({share:.0%}; asked for: {LEAST_SHARE:.0%})")
    return int(share < LEAST_SHARE)


def copy_tree(module: str) -> None:
    """Copy what git knows of, and tell mutmut what to change and which tests to run."""
    shutil.rmtree(WORK, ignore_errors=True)
    words = ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES, "slipstream", "tests", "pyproject.toml"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        copy = WORK / _imported(name) if name.partition("/")[0] in PACKAGES else WORK / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    options = {
        "source_paths": ["slipstream"],
        "only_mutate": [_imported(module)],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist"],
        "pytest_add_cli_args_test_selection": tests_of(module),
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    text = "\n".join(["", "[tool.mutmut]", *lines, ""])
    tomllib.loads(text)
    with (WORK / "pyproject.toml").open("a") as file:
        file.write(text)


def tests_of(module: str) -> list[str]:
    """The files of its own tests."""
    found: list[str] = []
    for name in MODULES[module].split():
        place, _, stem = name.rpartition("/")
        found.append(f"{UNIT}/{place or module.rpartition('/')[0]}/test_{stem}.py")
    return found


def _imported(name: str) -> str:
    """Where Python finds a file of the product; the checkout has links in the place of these folders."""
    return f"slipstream/{name}"


def mutmut(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it in the copy."""
    environment = os.environ | {"PYTHONPATH": str(TOOL)}
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *words], cwd=WORK, env=environment, capture_output=True, text=True, check=False
    )


def drawn_faults(module: str, count: int, seed: int) -> list[str]:
    """Names of some of the module's faults."""
    made = mutmut("run", "--max-children", "1", "no such fault")  # writes them all, and sees what each test calls
    path = WORK / "mutants" / _imported(module)
    if not path.with_name(f"{path.name}.meta").is_file():
        raise SystemExit(f"{module}: no faults were made\n{made.stdout[-3000:]}{made.stderr[-3000:]}")
    known = json.loads(path.with_name(f"{path.name}.meta").read_text())["exit_code_by_key"]
    forms = {node.name: bare(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)}
    names = []
    for name in sorted(known):
        function = name.rpartition(".")[2]
        original = f"{function.rpartition('__mutmut_')[0]}__mutmut_orig"
        if function in forms and forms[function] != forms.get(original):
            names.append(name)
    return sorted(random.Random(f"{seed} {module}").sample(names, min(count, len(names))))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Bare(ast.NodeTransformer):
    """Leaves out what is said: texts, what is logged, the words of an error, and how types are called."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        said = isinstance(node.value, ast.Constant) or "logger." in ast.unparse(node)
        return ast.Pass() if said else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> Any:
        kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return ast.Raise(kind, None)

    def visit_keyword(self, node: ast.keyword) -> Any:
        return None if node.arg == "strict" else self.generic_visit(node)  # of zip: a check of our own bugs

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return ast.Constant("")

    def visit_Constant(self, node: ast.Constant) -> Any:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        value = None if node.value is None else self.visit(node.value)
        return ast.Assign([node.target], value) if value is not None else ast.Pass()


def bare(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """What a function does, without what it says."""
    body = ast.Module([_Bare().visit(statement) for statement in function.body], [])
    return ast.unparse(ast.fix_missing_locations(body))


def run_faults(module: str, names: Sequence[str]) -> dict[str, int]:
    """mutmut's exit code of each of these faults."""
    done = mutmut("run", "--max-children", "1", *names)
    path = WORK / "mutants" / _imported(f"{module}.meta")
    codes = json.loads(path.read_text())["exit_code_by_key"]
    unknown = [name for name in names if codes[name] is None]
    if unknown:
        raise SystemExit(f"{module}: {len(unknown)} faults were not tried\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {name: codes[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
