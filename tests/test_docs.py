"""The pages: the reference lists what the guides use; slowly, they are built and looked at in a real browser, wide and narrow."""

import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, Browser

DOCS = Path(__file__).parents[1] / "docs"


def resolved(name: str) -> Any:
    """What a dotted name means; None if there is no such name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        return functools.reduce(lambda inside, part: getattr(inside, part, None), parts[cut:], found)
    return None


def sources() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]


def listed() -> set[int]:
    """The objects that the reference documents."""
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    names = re.findall(r"\.\. auto(?:class|function|exception):: (?!dohyo.integrations)(\S+)", text)
    found = {name: resolved(name) for name in names}
    assert None not in found.values()
    for module in map(resolved, re.findall(r"\.\. automodule:: (\S+)\n   :members:\n", text)):
        found |= {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
    return {id(one) for one in found.values()}


def used(page: Path) -> set[str]:
    """The names of ours in a page's examples."""
    code = "\n".join(re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    imports = re.findall(r"from (dohyo[\w.]*) import ([\w, ]+)", code)
    imported = {f"{module}.{name.strip()}" for module, names in imports for name in names.split(",")}
    return {name for name in {*imported, *re.findall(r"\bdohyo(?:\.\w+)+", code)} if "integrations" not in name}


def test_the_reference_lists_what_the_guides_use() -> None:
    known, names = listed(), {(page.name, name) for page in sources() for name in used(page)}
    assert len(names) > 100
    objects = {(page, name): resolved(name) for page, name in names}
    missing = [key for key, one in objects.items() if (inspect.isclass(one) or inspect.isfunction(one)) and id(one) not in known]
    assert missing == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_pages_in_a_browser(tmp_path: Path) -> None:
    """Built without a warning; formulas without a network, no line of code cut off, and no page wider than the screen."""
    out = tmp_path / "html"
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(out)], check=True, timeout=900)
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in sources()]
    with Browser.open(tmp_path / "profile") as browser:
        for page in pages:
            for width in (1400, 390):
                browser.show(out / page, width)
                browser.ask("window.MathJax && MathJax.startup.promise.then(() => true)")
                shown, written = (
                    browser.ask(f"document.querySelectorAll('{what}').length") for what in ("mjx-container svg", ".math")
                )
                assert shown >= written, page
                assert browser.ask("document.querySelectorAll('mjx-merror').length") == 0, page
                cut = "[...document.querySelectorAll('.highlight pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
                assert browser.ask(cut) == 0, (page, width)
                assert browser.ask("document.documentElement.scrollWidth") <= width, (page, width)
        assert all(address.startswith("file:") for address in browser.requests)
        assert browser.problems == []
