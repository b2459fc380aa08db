"""The product has one name at the top: a folder of the checkout is no package of its own."""

import importlib
import sys
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[2]
LINKS = sorted(path.name for path in Path(slipstream.__file__).parent.iterdir() if path.is_symlink())


@pytest.mark.parametrize("name", LINKS)
def test_a_folder_of_the_checkout_is_not_imported_by_its_own_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(AssertionError, match=f"import slipstream.{name}"):
        importlib.import_module(name)
    assert name not in sys.modules


def test_every_package_of_the_checkout_is_linked() -> None:
    assert LINKS == ["conf", "fleet", "orchestrator", "rollout", "trainer", "weight_sync"]
    assert all((ROOT / "slipstream" / name).resolve() == ROOT.resolve() / name for name in LINKS)
