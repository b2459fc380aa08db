"""Help of the command line: complete, true and quick."""

import re
from pathlib import Path

import pytest
from fakes.command import run_python

from slipstream.conf.load import load_run_config
from slipstream.conf.options import GROUPS, flat_options, group_choices, section_docs
from slipstream.orchestrator.cli.commands import COMMANDS
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.start_commands import AT_ONCE

pytestmark = pytest.mark.usefixtures("somewhere_else")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_top_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "slipstream train experiment=quickstart" in out
    assert "slipstream doctor" in out


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_before_a_command_is_the_commands_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "merge"]) == 0
    assert capsys.readouterr().out.startswith("usage: slipstream merge")
    assert main([word, "train", "trainer.ep_size"]) == 0
    assert capsys.readouterr().out.startswith("trainer.ep_size=")
    assert main([word, "mrge"]) == 2
    assert "Did you mean merge?" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slipstream")


def test_train_help_names_every_group_choice_and_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\(1\s+options\)", out)
    words = out.split()
    for group in GROUPS:
        assert group in words
        assert all(choice.name in words for choice in group_choices(group))
    assert all(section in words for section in section_docs())


@pytest.mark.parametrize("topic", ["trainer", "trainer.lora", "trainer.ep_size", "experiment", "options"])
def test_help_on_a_topic(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", topic]) == 0
    out = capsys.readouterr().out
    for option in flat_options():
        if topic == "options" or option.name == topic or option.name.startswith(f"{topic}."):
            assert f"{option.name}=" in out
    presets = {choice.name for choice in group_choices("experiment")}
    assert presets & set(out.split()) == (presets if topic == "experiment" else set())


def test_help_beside_overrides_is_general_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "experiment=quickstart"]) == 0
    assert capsys.readouterr().out.startswith("usage: slipstream train")


def test_help_on_an_unknown_topic_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "trainr"]) == 2
    assert capsys.readouterr().err.startswith("error: no help on 'trainr'. Did you mean trainer")


def test_help_lists_a_preset_without_a_comment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n")
    assert main(["train", "--config-dir", str(tmp_path), "--help", "experiment"]) == 0
    assert "\n  mine\n" in capsys.readouterr().out


def test_examples_of_help_compose(capsys: pytest.CaptureFixture[str]) -> None:
    """Every `slipstream train` and `slipstream plan` that it shows names options and choices that exist. (Those of
    pages: tests/unit/pages.)
    """
    for words in (["--help"], ["train", "--help"], ["plan", "--help"]):
        assert main(words) == 0
    shown = capsys.readouterr().out
    shown = re.sub(r"\s*\\\n\s*", " ", shown)  # an example may go on in the next line
    examples = re.findall(r"^ +slipstream (?:train|plan) ([^#\n]*=[^#\n]*)", shown, re.MULTILINE)
    known = [words.split("  ")[0].split() for words in examples if "..." not in words and "mine" not in words]
    assert len(known) >= 9
    for words in known:
        load_run_config([word for word in words if re.match(r"[a-z_.]+=", word)])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: slipstream {command}")
    for flag in re.findall(r"^  (--\S+)", shown, re.MULTILINE):
        assert re.search(rf"^  {flag}[^\n]*(  \w|\n {{10,}}\w)", shown, re.MULTILINE), flag
    if COMMANDS[command].needs_words:
        assert main([command]) == 2, "nothing was done"
        assert capsys.readouterr().out == shown


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "vllm", "transformers", "mooncake"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


def test_help_config_and_controller_need_no_heavy_library() -> None:
    code = BLOCK + (
        "import slipstream.orchestrator.loop.controller, slipstream.orchestrator.run\n"
        "from slipstream.orchestrator.cli.main import main\n"
        "assert main(['train', '--help']) == 0\n"
        "assert main(['train', 'experiment=quickstart', '--cfg', 'job']) == 0\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
        "del sys.meta_path[0]\n"
        "import slipstream.orchestrator.cluster.placement\n"  # with Ray
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_missing_base_package_is_one_message() -> None:
    # None in sys.modules makes the import raise ModuleNotFoundError.
    code = "import sys; sys.modules['hydra'] = None; from slipstream.orchestrator.cli.main import main; "
    done = run_python(code + "sys.exit(main(['train', 'experiment=quickstart']))")
    assert (done.returncode, done.stdout) == (2, "")
    lacks = "error: this environment lacks hydra; run `make setup`, then see: slipstream doctor\n"
    assert done.stderr == f"{AT_ONCE}\n{lacks}"


def test_help_loads_neither_hydra_nor_numpy() -> None:
    """What makes `--help` answer at once: a list of modules, not a stopwatch."""
    code = (
        "import sys; from slipstream.orchestrator.cli.main import main; main(['--help']); main(['train', '--help'])\n"
        "assert not {'hydra', 'omegaconf', 'numpy', 'torch', 'ray', 'rich'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


SAYS_WHEN_HYDRA_COMES = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "hydra":
            print("hydra is imported", file=sys.stderr)

sys.meta_path.insert(0, Finder())
from slipstream.orchestrator.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["train"], ["resume", "RUN"], ["eval", "RUN"]])
def test_a_command_answers_before_options_are_read(words: list[str], tmp_path: Path) -> None:
    """Which takes seconds on a busy machine."""
    (tmp_path / "config.yaml").write_text("run: {num_steps: 9}")
    words = [word.replace("RUN", str(tmp_path)) for word in words]
    done = run_python(SAYS_WHEN_HYDRA_COMES, *words, "run.num_steps=none")
    assert (done.returncode, done.stderr.splitlines()[:2]) == (2, [AT_ONCE, "hydra is imported"])
