"""Every `>>>` of the guide pages and docstrings of the integrations, where their packages are installed."""

import doctest
import importlib
import os
import warnings
from pathlib import Path

import pytest

import dohyo

PAGES = Path(__file__).parents[2] / "docs" / "guides" / "integrations"
PACKAGES = {
    "pyro.md": ["pyro"],
    "lightning.md": ["lightning"],
    "scvi.md": ["scvi"],
    "jax.md": ["jax", "numpyro", "flax", "blackjax"],
    "arviz.md": ["arviz"],
    "zuko.md": ["zuko"],
    "torch.md": [],
    "pythae.md": ["pythae"],
    "dohyo.integrations": [],
    "dohyo.integrations.pyro": ["pyro"],
    "dohyo.integrations.pyro_objective": ["pyro"],
    "dohyo.integrations.lightning": ["lightning"],
    "dohyo.integrations.scvi": ["scvi"],
    "dohyo.integrations.jax": ["jax"],
    "dohyo.integrations.arviz": ["arviz"],
}
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("name", PACKAGES)
def test_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries deprecate and advise
        for package in PACKAGES[name]:
            pytest.importorskip(package)
        if name.endswith(".md"):
            found = doctest.testfile(str(PAGES / name), module_relative=False, optionflags=OPTIONS, encoding="utf-8")
        else:
            found = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert found.attempted > 0
    assert found.failed == 0


def test_no_page_is_forgotten() -> None:
    assert {path.name for path in PAGES.glob("*.md")} <= set(PACKAGES)
    examples = [path for path in (Path(dohyo.__file__).parent / "integrations").glob("*.py") if ">>>" in path.read_text("utf-8")]
    named = {f"dohyo.integrations.{path.stem}".removesuffix(".__init__") for path in examples}
    assert named <= set(PACKAGES)


@pytest.mark.skipif(os.environ.get("DOHYO_INTEGRATIONS") != "all", reason="only `make test-integrations` installs all")
def test_nothing_is_skipped() -> None:
    for package in {package for packages in PACKAGES.values() for package in packages}:
        importlib.util.find_spec(package) or pytest.fail(f"{package} is not installed")
